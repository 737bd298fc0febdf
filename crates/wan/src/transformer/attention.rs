//! Scaled dot-product attention behind one function.
//!
//! ```text
//! o = softmax(q k^T / sqrt(d) + bias) v
//! ```
//!
//! The engine's own attention materialises the [L, L] probabilities and keeps them for backward. Here only the
//! output is kept; forward and backward compute the probabilities in chunks of queries (Rabe & Staats 2021, Dao et al. 2022), so
//! memory is linear in tokens.
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

/// Scores of one chunk of queries, over all samples and heads: 512 MiB in f32. Backward has probabilities and their gradient at once, and the result
/// of the step in between: three such tensors.
pub const MAX_SCORES: usize = 1 << 27;

/// Chunks are multiples of this many rows, and at least that: what tiles of matrix units divide.
const ROWS: usize = 32;

/// Query rows of a chunk for B samples of H heads over T keys: as many as [`MAX_SCORES`] has room for.
pub fn rows_of_chunk([samples, heads, keys]: [usize; 3]) -> usize {
    (MAX_SCORES / (samples * heads * keys).max(1) / ROWS * ROWS).max(ROWS)
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

/// Products with f32 results.
pub(super) trait WideProducts: Backend {
    /// a b in f32, of factors in any dtype.
    fn wide_product(a: FloatTensor<Self>, b: FloatTensor<Self>) -> FloatTensor<Self> {
        as_dtype::<Self>(Self::float_matmul(a, b), DType::F32)
    }
}

/// Sums in f32, and rounds them to the dtype of the factors.
impl WideProducts for Flex {}

#[cfg(feature = "gpu")]
impl WideProducts for Cube {
    fn wide_product(a: FloatTensor<Self>, b: FloatTensor<Self>) -> FloatTensor<Self> {
        super::fused::wide_product(a, b)
    }
}

/// In chunks of queries: where the engine has no fused kernel it would materialise all probabilities, 50 GB for a clip of full size.
pub(super) fn in_chunks<B: WideProducts>(q: FloatTensor<B>, k: FloatTensor<B>, v: FloatTensor<B>, bias: FloatTensor<B>) -> FloatTensor<B> {
    let [b, h, ..] = q.shape().dims::<4>();
    let rows = rows_of_chunk([b, h, k.shape().dims::<4>()[2]]);
    in_chunks_of::<B>(rows, q, k, v, bias)
}

/// The same, in chunks of `rows`.
fn in_chunks_of<B: WideProducts>(
    rows: usize,
    q: FloatTensor<B>,
    k: FloatTensor<B>,
    v: FloatTensor<B>,
    bias: FloatTensor<B>,
) -> FloatTensor<B> {
    let ([b, h, l, d], dtype) = (q.shape().dims::<4>(), q.dtype());
    let (scale, k_t) = (1.0 / (d as f64).sqrt(), B::float_transpose(k));
    let chunk = |from: usize| {
        let q = B::float_mul_scalar(query_rows::<B>(&q, [b, h, from, (from + rows).min(l), d]), scale.into());
        B::float_matmul(as_dtype::<B>(probabilities::<B>(q, k_t.clone(), bias.clone()), dtype), v.clone())
    };
    B::float_cat((0..l).step_by(rows).map(chunk).collect(), 2)
}

/// softmax(q k^T + bias) in f32, of scaled queries.
fn probabilities<B: WideProducts>(q: FloatTensor<B>, k_t: FloatTensor<B>, bias: FloatTensor<B>) -> FloatTensor<B> {
    B::softmax(B::float_add(B::wide_product(q, k_t), bias), 3)
}

impl<B: WideProducts + LinearMemoryAttention, C: CheckpointStrategy> LinearMemoryAttention for Autodiff<B, C> {
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

impl<B: WideProducts> Backward<B, 3> for RecomputingBackward {
    type State = Saved<B>;

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
        let [q_node, k_node, v_node] = ops.parents;
        let grad = grads.consume::<B>(&ops.node);
        let Saved { q, k, .. } = &ops.state;
        let [b, h, ..] = q.shape().dims::<4>();
        let rows = rows_of_chunk([b, h, k.shape().dims::<4>()[2]]);
        let [dq, dk, dv] = gradients::<B>(rows, ops.state, grad);
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
fn gradients<B: WideProducts>(chunk: usize, saved: Saved<B>, grad: FloatTensor<B>) -> [FloatTensor<B>; 3] {
    let Saved { q, k, v, bias, output } = saved;
    let ([b, h, l, d], dtype) = (q.shape().dims::<4>(), q.dtype());
    let scale = 1.0 / (d as f64).sqrt();
    let (k_t, v_t) = (B::float_transpose(k.clone()), B::float_transpose(v));
    let rows = |x: &FloatTensor<B>, from: usize, to: usize| query_rows::<B>(x, [b, h, from, to, d]);
    let wide = |x: FloatTensor<B>| as_dtype::<B>(x, DType::F32);
    let (mut dq, mut dk, mut dv) = (Vec::new(), None, None);
    for from in (0..l).step_by(chunk) {
        let to = (from + chunk).min(l);
        let q = B::float_mul_scalar(rows(&q, from, to), scale.into());
        let (g, o) = (rows(&grad, from, to), rows(&output, from, to));
        let p = probabilities::<B>(q.clone(), k_t.clone(), bias.clone());
        accumulate::<B>(&mut dv, B::wide_product(B::float_transpose(as_dtype::<B>(p.clone(), dtype)), g.clone()));
        let dp = B::wide_product(g.clone(), v_t.clone());
        let row_sum = B::float_sum_dim(B::float_mul(wide(g), wide(o)), 3);
        let ds = as_dtype::<B>(B::float_mul(p, B::float_sub(dp, row_sum)), dtype);
        dq.push(B::float_mul_scalar(B::float_matmul(ds.clone(), k.clone()), scale.into()));
        accumulate::<B>(&mut dk, B::wide_product(B::float_transpose(ds), q));
    }
    let whole = |sum: Option<FloatTensor<B>>| as_dtype::<B>(sum.unwrap_or_else(|| unreachable!("at least one chunk of queries")), dtype);
    [B::float_cat(dq, 2), whole(dk), whole(dv)]
}

/// Rows `from..to` of x [b, h, L, d].
pub(super) fn query_rows<B: Backend>(x: &FloatTensor<B>, [b, h, from, to, d]: [usize; 5]) -> FloatTensor<B> {
    let range = |from: usize, to: usize| Slice::from(from as isize..to as isize);
    B::float_slice(x.clone(), &[range(0, b), range(0, h), range(from, to), range(0, d)])
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

    fn flex(x: &Tensor<4>) -> FloatTensor<Flex> {
        x.clone().try_into_primitive::<Flex>().unwrap_or_else(|_| unreachable!("made on the CPU"))
    }

    fn worst(ours: FloatTensor<Flex>, expected: &Tensor<4>) -> f32 {
        crate::weights::to_floats((Tensor::<4>::from_primitive::<Flex>(ours) - expected.clone()).abs().max())[0]
    }

    #[test]
    fn chunks_of_queries_give_what_all_of_them_give() {
        let (queries, keys) = ([2, 3, 700, 8], [2, 3, 9, 8]);
        let (q, k, v, bias, g) = (normals(1, queries), normals(2, keys), normals(3, keys), normals(4, [1, 1, 1, 9]), normals(5, queries));
        let whole = burn::tensor::module::attention(q.clone(), k.clone(), v.clone(), None, Some(bias.clone()), Default::default());
        let gradients_in = |chunk: usize| {
            let output = in_chunks_of::<Flex>(chunk, flex(&q), flex(&k), flex(&v), flex(&bias));
            assert!(worst(output.clone(), &whole) < 2e-6, "{chunk} rows");
            gradients::<Flex>(chunk, Saved { q: flex(&q), k: flex(&k), v: flex(&v), bias: flex(&bias), output }, flex(&g))
        };
        let at_once = gradients_in(700).map(Tensor::<4>::from_primitive::<Flex>);
        for chunk in [32, 512] {
            for (ours, expected) in gradients_in(chunk).into_iter().zip(&at_once) {
                assert!(worst(ours, expected) < 2e-5, "{chunk} rows");
            }
        }
    }

    #[test]
    fn a_chunk_of_scores_has_a_bound() {
        // text of Wan2.1 1.3B, then its clip and that of 14B at full size, and more keys than there is room for
        for (sizes, rows) in
            [([1, 12, 512], 21_824), ([1, 12, 32_760], 320), ([2, 40, 32_760], 32), ([1, 40, 32_760], 96), ([8, 40, 75_600], 32)]
        {
            assert_eq!(rows_of_chunk(sizes), rows, "{sizes:?}");
        }
    }
}
