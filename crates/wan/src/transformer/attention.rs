//! Scaled dot-product attention behind one function.
//!
//! ```text
//! o = softmax(q k^T / sqrt(d) + bias) v
//! ```
//!
//! The engine's own attention materialises the [L, L] probabilities and keeps them for backward. Here only the
//! output is kept; forward and backward compute the probabilities in chunks, of samples and heads first and then of queries (Rabe & Staats 2021,
//! Dao et al. 2022), so memory is linear in tokens.
//!
//! In bf16 the factors of the products are bf16, for the sake of matrix units; scores, softmax and the sums over chunks are f32. Where a device has matrix
//! units for it, the forward pass without bias is the engine's fused kernel (`fused`).

use crate::ops::as_dtype;
#[cfg(feature = "gpu")]
use burn::backend::Cube;
use burn::backend::autodiff::{
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, TensorMetadata, backend_extension};
use burn::tensor::{DType, Slice, Tensor};
use std::ops::Range;

/// Scores of one chunk: 512 MiB in f32. Backward has probabilities and their gradient at once, and the result of the step in between: three such
/// tensors.
pub const MAX_SCORES: usize = 1 << 27;

/// Chunks are multiples of this many rows, and at least that: what tiles of matrix units divide.
const ROWS: usize = 32;

/// What is computed at once. Heads have nothing in common, so it is they that are divided first: chunks of queries share keys and values, and each of
/// them adds to the gradients of all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Chunk {
    samples: usize,
    heads: usize,
    queries: usize,
}

impl Chunk {
    /// As much as [`MAX_SCORES`] has room for, of B samples of H heads with L queries over T keys.
    fn of([samples, heads, queries, keys]: [usize; 4]) -> Self {
        let of_head = (queries * keys).max(1);
        if of_head * heads <= MAX_SCORES {
            Self { samples: (MAX_SCORES / (of_head * heads.max(1))).clamp(1, samples.max(1)), heads, queries }
        } else if of_head <= MAX_SCORES {
            Self { samples: 1, heads: MAX_SCORES / of_head, queries }
        } else {
            Self { samples: 1, heads: 1, queries: (MAX_SCORES / keys / ROWS * ROWS).max(ROWS) }
        }
    }
}

/// Scores that are in memory at once, of B samples of H heads with L queries over T keys.
pub fn scores_at_once(sizes: [usize; 4]) -> usize {
    let Chunk { samples, heads, queries } = Chunk::of(sizes);
    samples * heads * queries.min(sizes[2]) * sizes[3]
}

/// q [B, H, L, d], k and v [B, H, T, d], bias [1, 1, 1, T] (a constant) -> [B, H, L, d].
pub fn attention(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, bias: Option<&Tensor<4>>) -> Tensor<4> {
    // no bias is one for all keys
    let bias = match bias {
        Some(bias) => bias.clone(),
        None => Tensor::zeros([1; 4], (&q.device().inner(), DType::F32)),
    };
    Tensor::from_dispatch(<Dispatch as LinearMemoryAttention>::attend(
        q.into_dispatch(),
        k.into_dispatch(),
        v.into_dispatch(),
        bias.into_dispatch(),
    ))
}

/// Whether the forward pass of [`attention`] with queries like `q` is a fused kernel's.
pub fn is_fused(q: &Tensor<4>, bias: Option<&Tensor<4>>) -> bool {
    #[cfg(feature = "gpu")]
    if let (None, Ok(q)) = (bias, q.clone().inner().try_into_primitive::<Cube>()) {
        return super::fused::planes(&q).is_some();
    }
    let _ = (q, bias); // there is none on the CPU
    false
}

/// The operation as an extension of the engine's backends.
#[backend_extension(Flex, Cube: cfg(feature = "gpu"), Autodiff)]
pub trait LinearMemoryAttention: Backend {
    /// See [`attention`]; `bias` is f32, and no gradient flows to it.
    fn attend(q: FloatTensor<Self>, k: FloatTensor<Self>, v: FloatTensor<Self>, bias: FloatTensor<Self>) -> FloatTensor<Self>;
}

impl LinearMemoryAttention for Flex {
    fn attend(q: FloatTensor<Self>, k: FloatTensor<Self>, v: FloatTensor<Self>, bias: FloatTensor<Self>) -> FloatTensor<Self> {
        in_chunks::<Self>(q, k, v, bias)
    }
}

#[cfg(feature = "gpu")]
impl LinearMemoryAttention for Cube {
    fn attend(q: FloatTensor<Self>, k: FloatTensor<Self>, v: FloatTensor<Self>, bias: FloatTensor<Self>) -> FloatTensor<Self> {
        // no bias is one for all keys
        let fused = if bias.shape().num_elements() == 1 { super::fused::attend(&q, &k, &v, &bias) } else { None };
        fused.unwrap_or_else(|| in_chunks::<Self>(q, k, v, bias))
    }
}

/// What chunks are computed with.
pub(super) trait ChunkOps: Backend {
    /// a b in f32, of factors in any dtype.
    fn wide_product(a: FloatTensor<Self>, b: FloatTensor<Self>) -> FloatTensor<Self> {
        as_dtype::<Self>(Self::float_matmul(a, b), DType::F32)
    }

    /// softmax of rows.
    fn softmax_of_rows(x: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::softmax(x, 3)
    }

    /// The same values, one row after the other, so that no product copies them.
    fn in_order(x: FloatTensor<Self>) -> FloatTensor<Self> {
        x
    }
}

/// Sums in f32, and rounds them to the dtype of the factors.
impl ChunkOps for Flex {}

#[cfg(feature = "gpu")]
impl ChunkOps for Cube {
    fn wide_product(a: FloatTensor<Self>, b: FloatTensor<Self>) -> FloatTensor<Self> {
        super::fused::wide_product(a, b)
    }

    fn softmax_of_rows(x: FloatTensor<Self>) -> FloatTensor<Self> {
        super::fused::softmax_of_rows(x)
    }

    fn in_order(x: FloatTensor<Self>) -> FloatTensor<Self> {
        super::fused::in_order(x)
    }
}

/// In chunks: where the engine has no fused kernel it would materialise all probabilities, 50 GB for a clip of full size.
pub(super) fn in_chunks<B: ChunkOps>(q: FloatTensor<B>, k: FloatTensor<B>, v: FloatTensor<B>, bias: FloatTensor<B>) -> FloatTensor<B> {
    let chunk = Chunk::of(sizes::<B>(&q, &k));
    let [output] = by_heads::<B, 3, 1>(chunk, [q, k, v], &|[q, k, v]| [in_rows::<B>(chunk.queries, q, k, v, &bias)]);
    output
}

/// [B, H, L, T]
fn sizes<B: Backend>(q: &FloatTensor<B>, k: &FloatTensor<B>) -> [usize; 4] {
    let [b, h, l, _] = q.shape().dims::<4>();
    [b, h, l, k.shape().dims::<4>()[2]]
}

/// Applies `compute` to the samples and heads of one chunk after the other, and joins what it gives.
fn by_heads<B: ChunkOps, const N: usize, const M: usize>(
    chunk: Chunk,
    inputs: [FloatTensor<B>; N],
    compute: &dyn Fn([FloatTensor<B>; N]) -> [FloatTensor<B>; M],
) -> [FloatTensor<B>; M] {
    let [b, h, ..] = inputs[0].shape().dims::<4>();
    let part = |samples: &Range<usize>, heads: Range<usize>| {
        let of = |x: &FloatTensor<B>| {
            let [_, _, rows, d] = x.shape().dims::<4>();
            B::in_order(part::<B>(x, [samples.clone(), heads.clone(), 0..rows, 0..d]))
        };
        compute(inputs.each_ref().map(of))
    };
    let of_samples = |samples: Range<usize>| joined::<B, M>(pieces(h, chunk.heads).map(|heads| part(&samples, heads)).collect(), 1);
    joined::<B, M>(pieces(b, chunk.samples).map(of_samples).collect(), 0)
}

/// 0..whole in pieces of at most `size`.
fn pieces(whole: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    (0..whole).step_by(size.max(1)).map(move |from| from..(from + size.max(1)).min(whole))
}

/// Each of the M tensors, from its parts along `dim`.
fn joined<B: Backend, const M: usize>(parts: Vec<[FloatTensor<B>; M]>, dim: usize) -> [FloatTensor<B>; M] {
    std::array::from_fn(|i| match parts.as_slice() {
        [only] => only[i].clone(),
        parts => B::float_cat(parts.iter().map(|part| part[i].clone()).collect(), dim),
    })
}

/// In chunks of `rows` queries.
fn in_rows<B: ChunkOps>(rows: usize, q: FloatTensor<B>, k: FloatTensor<B>, v: FloatTensor<B>, bias: &FloatTensor<B>) -> FloatTensor<B> {
    let ([.., l, d], dtype) = (q.shape().dims::<4>(), q.dtype());
    let (scale, k_t) = (1.0 / (d as f64).sqrt(), B::float_transpose(k));
    let chunk = |queries: Range<usize>| {
        let q = B::float_mul_scalar(query_rows::<B>(&q, queries), scale.into());
        B::float_matmul(as_dtype::<B>(probabilities::<B>(q, k_t.clone(), bias), dtype), v.clone())
    };
    let [output] = joined::<B, 1>(pieces(l, rows).map(|queries| [chunk(queries)]).collect(), 2);
    output
}

/// softmax(q k^T + bias) in f32, of scaled queries.
fn probabilities<B: ChunkOps>(q: FloatTensor<B>, k_t: FloatTensor<B>, bias: &FloatTensor<B>) -> FloatTensor<B> {
    let scores = B::wide_product(q, k_t);
    // one number for all keys changes nothing
    let is_constant = bias.shape().num_elements() == 1;
    B::softmax_of_rows(if is_constant { scores } else { B::float_add(scores, bias.clone()) })
}

impl<B: ChunkOps + LinearMemoryAttention, C: CheckpointStrategy> LinearMemoryAttention for Autodiff<B, C> {
    fn attend(q: FloatTensor<Self>, k: FloatTensor<Self>, v: FloatTensor<Self>, bias: FloatTensor<Self>) -> FloatTensor<Self> {
        let bias = bias.into_primitive();
        match RecomputingBackward.prepare::<C>([q.node(), k.node(), v.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let (q, k, v) = (q.into_primitive(), k.into_primitive(), v.into_primitive());
                let output = B::attend(q.clone(), k.clone(), v.clone(), bias.clone());
                prep.finish(Saved { q, k, v, bias, output: output.clone() }, output)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::attend(q.into_primitive(), k.into_primitive(), v.into_primitive(), bias)),
        }
    }
}

/// What backward keeps: nothing that grows with L x T.
#[derive(Debug, Clone)]
struct Saved<B: Backend> {
    q: FloatTensor<B>,
    k: FloatTensor<B>,
    v: FloatTensor<B>,
    bias: FloatTensor<B>,
    output: FloatTensor<B>,
}

#[derive(Debug)]
struct RecomputingBackward;

impl<B: ChunkOps> Backward<B, 3> for RecomputingBackward {
    type State = Saved<B>;

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
        let [q_node, k_node, v_node] = ops.parents;
        let grad = grads.consume::<B>(&ops.node);
        let chunk = Chunk::of(sizes::<B>(&ops.state.q, &ops.state.k));
        let [dq, dk, dv] = gradients::<B>(chunk, ops.state, grad);
        for (node, gradient) in [(q_node, dq), (k_node, dk), (v_node, dv)] {
            if let Some(node) = node {
                grads.register::<B>(node.id, gradient);
            }
        }
    }
}

/// ```text
/// p  = softmax(q k^T scale + bias)       dv = p^T g
/// dp = g v^T                             ds = p (dp - rowsum(g o))
/// dq = ds k scale                        dk = ds^T q scale
/// ```
fn gradients<B: ChunkOps>(chunk: Chunk, saved: Saved<B>, grad: FloatTensor<B>) -> [FloatTensor<B>; 3] {
    let Saved { q, k, v, bias, output } = saved;
    by_heads::<B, 5, 3>(chunk, [q, k, v, output, grad], &|inputs| gradients_in_rows::<B>(chunk.queries, inputs, &bias))
}

/// The same, in chunks of `rows` queries.
fn gradients_in_rows<B: ChunkOps>(rows: usize, [q, k, v, output, grad]: [FloatTensor<B>; 5], bias: &FloatTensor<B>) -> [FloatTensor<B>; 3] {
    let ([.., l, d], dtype) = (q.shape().dims::<4>(), q.dtype());
    let scale = 1.0 / (d as f64).sqrt();
    let (k_t, v_t) = (B::float_transpose(k.clone()), B::float_transpose(v));
    let wide = |x: FloatTensor<B>| as_dtype::<B>(x, DType::F32);
    let (mut dq, mut dk, mut dv) = (Vec::new(), None, None);
    for queries in pieces(l, rows) {
        let q = B::float_mul_scalar(query_rows::<B>(&q, queries.clone()), scale.into());
        let (g, o) = (query_rows::<B>(&grad, queries.clone()), query_rows::<B>(&output, queries));
        let p = probabilities::<B>(q.clone(), k_t.clone(), bias);
        accumulate::<B>(&mut dv, B::wide_product(B::float_transpose(as_dtype::<B>(p.clone(), dtype)), g.clone()));
        let dp = B::wide_product(g.clone(), v_t.clone());
        let row_sum = B::float_sum_dim(B::float_mul(wide(g), wide(o)), 3);
        let ds = as_dtype::<B>(B::float_mul(p, B::float_sub(dp, row_sum)), dtype);
        dq.push([B::float_mul_scalar(B::float_matmul(ds.clone(), k.clone()), scale.into())]);
        accumulate::<B>(&mut dk, B::wide_product(B::float_transpose(ds), q));
    }
    let whole = |sum: Option<FloatTensor<B>>| as_dtype::<B>(sum.unwrap_or_else(|| unreachable!("at least one chunk of queries")), dtype);
    let [dq] = joined::<B, 1>(dq, 2);
    [dq, whole(dk), whole(dv)]
}

/// Some rows of x [B, H, L, d].
pub(super) fn query_rows<B: Backend>(x: &FloatTensor<B>, rows: Range<usize>) -> FloatTensor<B> {
    let [b, h, _, d] = x.shape().dims::<4>();
    part::<B>(x, [0..b, 0..h, rows, 0..d])
}

fn part<B: Backend>(x: &FloatTensor<B>, ranges: [Range<usize>; 4]) -> FloatTensor<B> {
    if ranges.iter().zip(x.shape().dims::<4>()).all(|(range, all)| *range == (0..all)) {
        return x.clone();
    }
    B::float_slice(x.clone(), &ranges.map(|range| Slice::from(range.start as isize..range.end as isize)))
}

fn accumulate<B: Backend>(sum: &mut Option<FloatTensor<B>>, term: FloatTensor<B>) {
    *sum = Some(match sum.take() {
        None => term,
        Some(sum) => B::float_add(sum, term),
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::{Device, TensorData};
    use grpo::random::{Key, Purpose};

    fn normals(prompt: u64, shape: [usize; 4]) -> Tensor<4> {
        let key = Key { seed: 1, iteration: 0, prompt, rollout: 0, purpose: Purpose::Data };
        Tensor::from_data(TensorData::new(key.normals(shape.iter().product()), shape), &Device::flex())
    }

    /// max |a - b|, of values anywhere.
    fn worst(ours: Tensor<4>, expected: &Tensor<4>) -> f32 {
        crate::weights::to_floats((ours.to_device(&Device::flex()) - expected.clone()).abs().max())[0]
    }

    /// Output and gradients do not depend on how they are divided. Inputs are as layers give them, with heads beside rows in memory.
    fn check_chunks<B: ChunkOps>(read: impl Fn(Tensor<4>) -> FloatTensor<B>, write: impl Fn(FloatTensor<B>) -> Tensor<4>, allowed: f32) {
        let (queries, keys) = ([2, 700, 3, 8], [2, 9, 3, 8]);
        let [q, k, v, g] = [(1, queries), (2, keys), (3, keys), (5, queries)].map(|(seed, shape)| normals(seed, shape).swap_dims(1, 2));
        let bias = normals(4, [1, 1, 1, 9]);
        let whole = burn::tensor::module::attention(q.clone(), k.clone(), v.clone(), None, Some(bias.clone()), Default::default());
        let bias = read(bias);
        let gradients_in = |chunk: Chunk| {
            let [q, k, v, g] = [&q, &k, &v, &g].map(|x| read(x.clone()));
            let inputs = [q.clone(), k.clone(), v.clone()];
            let [output] = by_heads::<B, 3, 1>(chunk, inputs, &|[q, k, v]| [in_rows::<B>(chunk.queries, q, k, v, &bias)]);
            assert!(worst(write(output.clone()), &whole) < allowed, "{chunk:?}");
            gradients::<B>(chunk, Saved { q, k, v, bias: bias.clone(), output }, g).map(&write)
        };
        let at_once = gradients_in(Chunk { samples: 2, heads: 3, queries: 700 }).map(|gradient| gradient.to_device(&Device::flex()));
        for [samples, heads, queries] in [[2, 3, 32], [2, 3, 512], [1, 3, 700], [1, 2, 700], [1, 1, 512]] {
            let chunk = Chunk { samples, heads, queries };
            for (ours, expected) in gradients_in(chunk).into_iter().zip(&at_once) {
                assert!(worst(ours, expected) < 10.0 * allowed, "{chunk:?}");
            }
        }
    }

    #[test]
    fn chunks_give_what_all_at_once_gives() {
        let read = |x: Tensor<4>| x.try_into_primitive::<Flex>().unwrap_or_else(|_| unreachable!("made on the CPU"));
        check_chunks::<Flex>(read, Tensor::from_primitive::<Flex>, 2e-6);
    }

    #[cfg(feature = "gpu")]
    mod device {
        use super::*;
        use crate::device::{DeviceChoice, tolerance};

        /// On the device that `FLASH_GRPO_TEST_DEVICE` names.
        #[test]
        fn chunks_give_what_all_at_once_gives() {
            let Some(choice) = std::env::var("FLASH_GRPO_TEST_DEVICE").ok().and_then(|name| name.parse::<DeviceChoice>().ok()) else {
                return;
            };
            let DeviceChoice::Of(backend, _) = choice else { return };
            let device = choice.open().unwrap_or_else(|e| panic!("{e}")).device;
            let read = |x: Tensor<4>| {
                let x = x.to_device(&device).try_into_primitive::<Cube>();
                x.unwrap_or_else(|_| panic!("the device is no GPU"))
            };
            check_chunks::<Cube>(read, Tensor::from_primitive::<Cube>, tolerance(backend) as f32);
        }
    }

    #[test]
    fn a_chunk_of_scores_has_a_bound() {
        // a small model, text of Wan2.1 1.3B, clips of it and of 14B, and more keys than there is room for
        for (sizes, [samples, heads, queries]) in [
            ([64, 6, 80, 80], [64, 6, 80]),
            ([2, 12, 32_760, 512], [1, 8, 32_760]),
            ([1, 12, 7_800, 7_800], [1, 2, 7_800]),
            ([3, 12, 3_120, 3_120], [1, 12, 3_120]),
            ([2, 40, 32_760, 32_760], [1, 1, 4_096]),
            ([8, 40, 75_600, 75_600], [1, 1, 1_760]),
        ] {
            assert_eq!(Chunk::of(sizes), Chunk { samples, heads, queries }, "{sizes:?}");
            assert!(scores_at_once(sizes) <= MAX_SCORES, "{sizes:?}");
        }
        assert_eq!(scores_at_once([2, 40, 32_760, 32_760]), 4_096 * 32_760);
    }
}
