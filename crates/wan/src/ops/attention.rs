//! Attention on [B, L, D] tensors: the heads stay interleaved, so nothing is transposed or copied.
//!
//! Legend: `B` batch, `L` queries, `T` keys, `D` = heads x d.

// The engine's macro writes code without documentation.
#![allow(missing_docs)]

use super::matmul::{Lhs, PANEL, Packed, Rhs, Start, multiply};
use super::rows::{exp, map_blocks, map_rows, max, sum, sum_2, vectorized, zeroed};
use super::{absent, dims, floats, tensor, widened};
use crate::layers::cast;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, backend_extension};
use burn::tensor::Tensor;
use rayon::prelude::*;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Scores that are alive at once on a thread.
const SCORES: usize = 1 << 15;

/// q [B, L, D], k and v [B, T, D], bias [1, 1, 1, T] (a constant) -> [B, L, D].
///
/// ```text
/// o = softmax(q k^T / sqrt(d) + bias) v     within each head
/// ```
///
/// Backward keeps q, k, v and one number per row, and computes the probabilities again.
pub fn attention(q: Tensor<3>, k: Tensor<3>, v: Tensor<3>, bias: Option<Tensor<4>>, heads: usize) -> Tensor<3> {
    let (dtype, biased) = (q.dtype(), bias.is_some());
    let bias = bias.unwrap_or_else(|| absent(&q)).into_dispatch();
    let [q, k, v] = [q, k, v].map(|t| widened(t).into_dispatch());
    cast(Tensor::from_dispatch(<Dispatch as HeadAttention>::attend_heads(q, k, v, bias, Heads { heads, biased })), dtype)
}

/// What the operation is told beside the tensors.
#[derive(Debug, Clone, Copy)]
pub struct Heads {
    pub heads: usize,
    /// Whether there is a bias; else it is any tensor.
    pub biased: bool,
}

#[backend_extension(Flex, Autodiff)]
pub trait HeadAttention: Backend {
    fn attend_heads(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        heads: Heads,
    ) -> FloatTensor<Self>;
}

impl HeadAttention for Flex {
    fn attend_heads(q: FlexTensor, k: FlexTensor, v: FlexTensor, bias: FlexTensor, heads: Heads) -> FlexTensor {
        Inputs::new([q, k, v], bias, heads).forward().0
    }
}

impl<C: CheckpointStrategy> HeadAttention for Autodiff<Flex, C> {
    fn attend_heads(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        heads: Heads,
    ) -> FloatTensor<Self> {
        let nodes = [q.node(), k.node(), v.node()];
        let inputs = Inputs::new([q, k, v].map(|t| t.into_primitive()), bias.into_primitive(), heads);
        let (o, stats) = inputs.forward();
        match HeadAttentionBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((inputs, stats), o),
            OpsKind::UnTracked(prep) => prep.finish(o),
        }
    }
}

#[derive(Debug, Clone)]
struct Inputs {
    q: FlexTensor,
    k: FlexTensor,
    v: FlexTensor,
    bias: Option<FlexTensor>,
    heads: usize,
}

#[derive(Debug)]
struct HeadAttentionBackward;

impl Backward<Flex, 3> for HeadAttentionBackward {
    /// The inputs, and the largest score and 1 / sum exp(score - largest) of each row [B, L, heads, 2].
    type State = (Inputs, Vec<f32>);

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<Flex>(&ops.node).to_contiguous();
        let (inputs, stats) = ops.state;
        let [of_q, of_k, of_v] = ops.parents;
        let heads = inputs.gradients(&stats, floats(&gradient));
        let (queries, keys) = (dims::<3>(&inputs.q), dims::<3>(&inputs.k));
        let parts = [(of_q, queries), (of_k, keys), (of_v, keys)];
        for (i, (node, shape)) in parts.into_iter().enumerate() {
            if let Some(node) = node {
                grads.register::<Flex>(node.id, tensor(inputs.join(&heads, i, shape), shape));
            }
        }
    }
}

/// One head of one sample: [rows, d] within rows of D.
#[derive(Clone, Copy)]
struct Head<'a> {
    data: &'a [f32],
    dim: usize,
    d: usize,
    rows: usize,
}

impl<'a> Head<'a> {
    fn skip_to_row(self, row: usize) -> Self {
        Self { data: &self.data[row * self.dim..], rows: self.rows - row, ..self }
    }

    fn lhs(self) -> Lhs<'a> {
        Lhs::rows(self.data, self.dim)
    }

    /// The transpose [d, rows] as a right operand.
    fn transposed(self) -> Packed {
        Packed::new(self.data, [self.d, self.rows], [1, self.dim])
    }

    /// The first `rows` rows as a right operand, in place if they are whole panels.
    fn rhs(self, rows: usize, packed: &'a mut Option<Packed>) -> Rhs<'a> {
        if self.d.is_multiple_of(PANEL) {
            return Rhs::rows(self.data, self.dim, self.d);
        }
        packed.insert(Packed::new(self.data, [rows, self.d], [self.dim, 1])).rhs()
    }
}

impl Inputs {
    fn new([q, k, v]: [FlexTensor; 3], bias: FlexTensor, Heads { heads, biased }: Heads) -> Self {
        let ([b, _, dim], [kb, t, k_dim]) = (dims(&q), dims(&k));
        assert_eq!(([kb, k_dim], dims(&v), dim % heads), ([b, dim], [b, t, dim], 0), "queries, keys, values and heads");
        let bias = biased.then(|| bias.to_contiguous());
        assert!(bias.as_ref().is_none_or(|bias| floats(bias).len() == t), "one bias per key");
        Self { q: q.to_contiguous(), k: k.to_contiguous(), v: v.to_contiguous(), bias, heads }
    }

    /// The head of number `index` = sample * heads + head.
    fn head<'a>(&self, data: &'a [f32], rows: usize, index: usize) -> Head<'a> {
        let dim = dims::<3>(&self.q)[2];
        let d = dim / self.heads;
        Head { data: &data[index / self.heads * rows * dim + index % self.heads * d..], dim, d, rows }
    }

    fn scale(&self) -> f32 {
        (1.0 / ((dims::<3>(&self.q)[2] / self.heads) as f64).sqrt()) as f32
    }

    /// Query rows that are worked on together.
    fn block(&self) -> usize {
        let ([_, l, _], [_, t, _]) = (dims(&self.q), dims(&self.k));
        let most = (SCORES / t.max(1)).clamp(8, 64);
        l.div_ceil(l.div_ceil(most).max(1)).max(1)
    }

    /// o [B, L, D], and the largest score and 1 / sum exp(score - largest) of each row [B, L, heads, 2].
    fn forward(&self) -> (FlexTensor, Vec<f32>) {
        let (shape @ [b, l, dim], [_, t, _]) = (dims(&self.q), dims::<3>(&self.k));
        let keys = (0..b * self.heads).into_par_iter().map(|i| self.head(floats(&self.k), t, i).transposed());
        let keys: Vec<Packed> = keys.collect();
        // each row is its own group: its "sums" are the statistics
        let stats_width = 2 * self.heads;
        let body = |rows: Range<usize>, out: &mut [MaybeUninit<f32>], stats: &mut [f32]| {
            let (out, mut at) = (zeroed(out), rows.start);
            while at < rows.end {
                // the part of the rows that lies in one sample
                let (sample, first) = (at / l, at % l);
                let count = (l - first).min(rows.end - at);
                let done = at - rows.start;
                for head in 0..self.heads {
                    let index = sample * self.heads + head;
                    let places = (&mut out[done * dim..], &mut stats[done * stats_width..]);
                    self.attend(index, first, count, &keys[index], places);
                }
                at += count;
            }
        };
        // SAFETY: the output is zeroed.
        let (o, stats) = unsafe { map_blocks(b * l, dim, [1, stats_width], body) };
        (tensor(o, shape), stats)
    }

    /// Some rows of one head, into rows of D and of heads x 2.
    fn attend(&self, index: usize, first: usize, rows: usize, keys: &Packed, (out, stats): (&mut [f32], &mut [f32])) {
        let ([_, l, dim], [_, t, _]) = (dims(&self.q), dims::<3>(&self.k));
        let (q, v) = (self.head(floats(&self.q), l, index), self.head(floats(&self.v), t, index));
        let (d, head) = (q.d, index % self.heads);
        let mut scores = vec![0.0; rows * t];
        multiply([rows, t, d], q.skip_to_row(first).lhs(), keys.rhs(), Start::Zero, &mut scores, t);
        let bias = self.bias.as_ref().map(floats);
        vectorized(
            #[inline(always)]
            || {
                for (row, scores) in scores.chunks_exact_mut(t).enumerate() {
                    let at = (row * self.heads + head) * 2;
                    [stats[at], stats[at + 1]] = softmax(scores, bias, self.scale());
                }
            },
        );
        let mut packed = None;
        multiply([rows, d, t], Lhs::rows(&scores, t), v.rhs(t, &mut packed), Start::Zero, &mut out[head * d..], dim);
    }

    /// [dq [L, d], dk [T, d], dv [T, d]] of each head.
    fn gradients(&self, stats: &[f32], gradient: &[f32]) -> Vec<[Vec<f32>; 3]> {
        let heads = dims::<3>(&self.q)[0] * self.heads;
        (0..heads).into_par_iter().map(|index| self.head_gradients(index, stats, gradient)).collect()
    }

    /// ```text
    /// p  = exp(q k^T scale + bias - largest) / total     dv = p^T g
    /// dp = g v^T                                         ds = p (dp - rowsum(p dp)) scale
    /// dq = ds k                                          dk = ds^T q
    /// ```
    fn head_gradients(&self, index: usize, stats: &[f32], gradient: &[f32]) -> [Vec<f32>; 3] {
        let ([_, l, _], [_, t, _]) = (dims::<3>(&self.q), dims::<3>(&self.k));
        let (q, g) = (self.head(floats(&self.q), l, index), self.head(gradient, l, index));
        let (k, v) = (self.head(floats(&self.k), t, index), self.head(floats(&self.v), t, index));
        let (d, keys, values) = (q.d, k.transposed(), v.transposed());
        let (mut dq, mut dk, mut dv) = (vec![0.0; l * d], vec![0.0; t * d], vec![0.0; t * d]);
        let mut packed = None;
        let k = k.rhs(t, &mut packed);
        let block = self.block();
        let (mut p, mut dp) = (vec![0.0; block * t], vec![0.0; block * t]);
        for first in (0..l).step_by(block) {
            let rows = block.min(l - first);
            let (q, g) = (q.skip_to_row(first), g.skip_to_row(first));
            multiply([rows, t, d], q.lhs(), keys.rhs(), Start::Zero, &mut p, t);
            multiply([rows, t, d], g.lhs(), values.rhs(), Start::Zero, &mut dp, t);
            let stats = &stats[((index / self.heads * l + first) * self.heads + index % self.heads) * 2..];
            self.score_gradients(&mut p[..rows * t], &mut dp, stats, t);
            multiply([rows, d, t], Lhs::rows(&dp, t), k, Start::Zero, &mut dq[first * d..], d);
            let (mut packed_q, mut packed_g) = (None, None);
            multiply([t, d, rows], Lhs::transposed(&dp, t), q.rhs(rows, &mut packed_q), Start::Existing, &mut dk, d);
            multiply([t, d, rows], Lhs::transposed(&p, t), g.rhs(rows, &mut packed_g), Start::Existing, &mut dv, d);
        }
        [dq, dk, dv]
    }

    /// From scores to probabilities and from dp to ds, in place.
    fn score_gradients(&self, p: &mut [f32], dp: &mut [f32], stats: &[f32], t: usize) {
        let (bias, scale) = (self.bias.as_ref().map(floats), self.scale());
        vectorized(
            #[inline(always)]
            || {
                for (row, (p, dp)) in p.chunks_exact_mut(t).zip(dp.chunks_exact_mut(t)).enumerate() {
                    scale_and_shift(p, bias, scale);
                    let at = row * self.heads * 2;
                    let (largest, inverse) = (stats[at], stats[at + 1]);
                    p.iter_mut().for_each(|p| *p = exp(*p - largest) * inverse);
                    let expected = sum_2(p, dp, |p, dp| p * dp);
                    for (dp, p) in dp.iter_mut().zip(&*p) {
                        *dp = p * (*dp - expected) * scale;
                    }
                }
            },
        );
    }

    /// The gradients of number `part` of all heads, side by side: [B, rows, D].
    fn join(&self, heads: &[[Vec<f32>; 3]], part: usize, [b, rows, dim]: [usize; 3]) -> Vec<f32> {
        let d = dim / self.heads;
        map_rows(b * rows, dim, |range, out| {
            for (row, out) in range.zip(out.chunks_exact_mut(dim)) {
                for (head, out) in out.chunks_exact_mut(d).enumerate() {
                    out.copy_from_slice(&heads[row / rows * self.heads + head][part][row % rows * d..][..d]);
                }
            }
        })
    }
}

#[inline(always)]
fn scale_and_shift(scores: &mut [f32], bias: Option<&[f32]>, scale: f32) {
    match bias {
        None => scores.iter_mut().for_each(|s| *s *= scale),
        Some(bias) => scores.iter_mut().zip(bias).for_each(|(s, bias)| *s = *s * scale + bias),
    }
}

/// softmax(scores scale + bias) in place; returns the largest and 1 / sum exp(score - largest).
#[inline(always)]
fn softmax(scores: &mut [f32], bias: Option<&[f32]>, scale: f32) -> [f32; 2] {
    scale_and_shift(scores, bias, scale);
    let largest = max(scores);
    scores.iter_mut().for_each(|s| *s = exp(*s - largest));
    let inverse = 1.0 / sum(scores, |s| s);
    scores.iter_mut().for_each(|s| *s *= inverse);
    [largest, inverse]
}
