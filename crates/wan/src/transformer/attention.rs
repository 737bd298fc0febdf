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
//! In bf16 the products are bf16, for the sake of matrix units; scores, softmax and the sums over chunks are f32. Where a device has matrix units for it,
//! the forward pass without bias is the engine's fused kernel (`fused`).

#[cfg(feature = "gpu")]
use burn::backend::Cube;
use burn::backend::autodiff::{
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, TensorMetadata, backend_extension};
use burn::tensor::{DType, FloatDType, Slice, Tensor};

/// Query rows whose probabilities are alive at once.
const CHUNK: usize = 512;

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
    fn attend(q: FloatTensor<Self>, k: FloatTensor<Self>, v: FloatTensor<Self>, bias: FloatTensor<Self>) -> FloatTensor<Self> {
        in_chunks::<Self>(q, k, v, bias)
    }
}

impl LinearMemoryAttention for Flex {}

#[cfg(feature = "gpu")]
impl LinearMemoryAttention for Cube {
    fn attend(q: FloatTensor<Self>, k: FloatTensor<Self>, v: FloatTensor<Self>, bias: FloatTensor<Self>) -> FloatTensor<Self> {
        // no bias is one for all keys
        let fused = if bias.shape().num_elements() == 1 { super::fused::attend(&q, &k, &v, &bias) } else { None };
        fused.unwrap_or_else(|| in_chunks::<Self>(q, k, v, bias))
    }
}

/// In chunks of queries: where the engine has no fused kernel it would materialise all probabilities, 50 GB for a clip of full size.
pub(super) fn in_chunks<B: Backend>(q: FloatTensor<B>, k: FloatTensor<B>, v: FloatTensor<B>, bias: FloatTensor<B>) -> FloatTensor<B> {
    let ([b, h, l, d], dtype) = (q.shape().dims::<4>(), q.dtype());
    let (scale, k_t) = (1.0 / (d as f64).sqrt(), B::float_transpose(k));
    let chunk = |from: usize| {
        let q = B::float_mul_scalar(query_rows::<B>(&q, [b, h, from, (from + CHUNK).min(l), d]), scale.into());
        B::float_matmul(as_dtype::<B>(probabilities::<B>(q, k_t.clone(), bias.clone()), dtype), v.clone())
    };
    B::float_cat((0..l).step_by(CHUNK).map(chunk).collect(), 2)
}

/// softmax(q k^T + bias) in f32, of scaled queries.
fn probabilities<B: Backend>(q: FloatTensor<B>, k_t: FloatTensor<B>, bias: FloatTensor<B>) -> FloatTensor<B> {
    let scores = as_dtype::<B>(B::float_matmul(q, k_t), DType::F32);
    B::softmax(B::float_add(scores, bias), 3)
}

fn as_dtype<B: Backend>(x: FloatTensor<B>, dtype: DType) -> FloatTensor<B> {
    if x.dtype() == dtype { x } else { B::float_cast(x, FloatDType::from(dtype)) }
}

impl<B: Backend + LinearMemoryAttention, C: CheckpointStrategy> LinearMemoryAttention for Autodiff<B, C> {
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

impl<B: Backend> Backward<B, 3> for RecomputingBackward {
    type State = Saved<B>;

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
        let [q_node, k_node, v_node] = ops.parents;
        let grad = grads.consume::<B>(&ops.node);
        let [dq, dk, dv] = gradients::<B>(ops.state, grad);
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
fn gradients<B: Backend>(saved: Saved<B>, grad: FloatTensor<B>) -> [FloatTensor<B>; 3] {
    let Saved { q, k, v, bias, output } = saved;
    let ([b, h, l, d], dtype) = (q.shape().dims::<4>(), q.dtype());
    let scale = 1.0 / (d as f64).sqrt();
    let (k_t, v_t) = (B::float_transpose(k.clone()), B::float_transpose(v));
    let rows = |x: &FloatTensor<B>, from: usize, to: usize| query_rows::<B>(x, [b, h, from, to, d]);
    let wide = |x: FloatTensor<B>| as_dtype::<B>(x, DType::F32);
    let (mut dq, mut dk, mut dv) = (Vec::new(), None, None);
    for from in (0..l).step_by(CHUNK) {
        let to = (from + CHUNK).min(l);
        let q = B::float_mul_scalar(rows(&q, from, to), scale.into());
        let (g, o) = (rows(&grad, from, to), rows(&output, from, to));
        let p = probabilities::<B>(q.clone(), k_t.clone(), bias.clone());
        let dp = wide(B::float_matmul(g.clone(), v_t.clone()));
        let row_sum = B::float_sum_dim(B::float_mul(wide(g.clone()), wide(o)), 3);
        let ds = as_dtype::<B>(B::float_mul(p.clone(), B::float_sub(dp, row_sum)), dtype);
        dq.push(B::float_mul_scalar(B::float_matmul(ds.clone(), k.clone()), scale.into()));
        accumulate::<B>(&mut dk, wide(B::float_matmul(B::float_transpose(ds), q)));
        accumulate::<B>(&mut dv, wide(B::float_matmul(B::float_transpose(as_dtype::<B>(p, dtype)), g)));
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

    #[test]
    fn chunks_of_queries_give_what_all_of_them_give() {
        let (queries, keys) = ([2, 3, CHUNK + 188, 8], [2, 3, 9, 8]);
        let (q, k, v, bias) = (normals(1, queries), normals(2, keys), normals(3, keys), normals(4, [1, 1, 1, 9]));
        let chunked = attention(q.clone(), k.clone(), v.clone(), Some(&bias));
        let whole = burn::tensor::module::attention(q, k, v, None, Some(bias), Default::default());
        let worst = crate::weights::to_floats((chunked - whole).abs().max())[0];
        assert!(worst < 2e-6, "{worst:e}");
    }
}
