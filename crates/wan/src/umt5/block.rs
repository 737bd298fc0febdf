//! One encoder layer: self-attention with a relative position bias, then a gated feed-forward layer.

use super::Umt5Config;
use crate::layers::{Linear, RmsNorm, cast};
use crate::ops::gelu_tanh;
use crate::param::Param;
use crate::weights::{Init, Weights};
use burn::tensor::activation::softmax;
use burn::tensor::{DType, Device, Int, Tensor};

/// One layer, pre-norm with residuals.
#[derive(Debug)]
pub struct Block {
    attention_norm: RmsNorm,
    attention: Attention,
    feed_forward_norm: RmsNorm,
    feed_forward: FeedForward,
}

impl Block {
    pub(super) fn new(w: &Weights, config: &Umt5Config) -> Self {
        let (first, second) = (w.sub("layer").sub(0), w.sub("layer").sub(1));
        let norm = |w: &Weights| RmsNorm::new(&w.sub("layer_norm"), config.d_model, config.layer_norm_epsilon);
        Self {
            attention: Attention::new(&first.sub("SelfAttention"), config),
            attention_norm: norm(&first),
            feed_forward: FeedForward::new(&second.sub("DenseReluDense"), config),
            feed_forward_norm: norm(&second),
        }
    }

    /// x [B, L, D] -> [B, L, D]
    pub fn forward(&self, x: Tensor<3>, positions: &Positions) -> Tensor<3> {
        let x = x.clone() + self.attention.forward(self.attention_norm.forward(x), positions);
        x.clone() + self.feed_forward.forward(self.feed_forward_norm.forward(x))
    }

    /// As [`forward`](Self::forward), for sequences of `lengths` tokens one after the other, x [1, sum of lengths, D], with the
    /// [`position_bias`](Self::position_bias) of one that is at least as long as each. A row depends on its own sequence alone, bit for bit
    /// where the linear layers promise it (`crate::ops`).
    pub(super) fn forward_each(&self, x: Tensor<3>, lengths: &[usize], bias: &Tensor<4>) -> Tensor<3> {
        let x = x.clone() + self.attention.forward_each(self.attention_norm.forward(x), lengths, bias);
        x.clone() + self.feed_forward.forward(self.feed_forward_norm.forward(x))
    }

    /// This layer's position bias [1, H, L, L], without graph.
    pub fn position_bias(&self, positions: &Positions) -> Tensor<4> {
        positions.bias(self.attention.bias_table.value())
    }
}

/// What attention has to know about the batch besides the tokens; the same for all layers.
#[derive(Debug)]
pub struct Positions {
    length: usize,
    /// [L * L], query-major.
    buckets: Tensor<1, Int>,
    /// [B, 1, 1, L], 0 for tokens and a huge negative number for padding; absent if there is no padding.
    padding: Option<Tensor<4>>,
}

impl Positions {
    /// Of a batch of prompts with `lengths` tokens, padded to `length`.
    pub fn new(config: &Umt5Config, length: usize, lengths: &[usize], device: &Device) -> Self {
        let (num_buckets, max_distance) = (config.relative_attention_num_buckets, config.relative_attention_max_distance);
        let bucket = |query, key| relative_position_bucket(query, key, num_buckets, max_distance) as i32;
        let buckets: Vec<i32> = (0..length).flat_map(|q| (0..length).map(move |k| bucket(q, k))).collect();
        let padding = lengths.iter().any(|&n| n < length).then(|| {
            let bias = |i: usize, n: usize| if i < n { 0.0 } else { MASKED };
            let bias: Vec<f32> = lengths.iter().flat_map(|&n| (0..length).map(move |i| bias(i, n))).collect();
            Tensor::<1>::from_floats(bias.as_slice(), device).reshape([lengths.len(), 1, 1, length])
        });
        Self { length, buckets: Tensor::from_ints(buckets.as_slice(), device), padding }
    }

    /// table [buckets, H] -> [1, H, L, L]
    fn bias(&self, table: Tensor<2>) -> Tensor<4> {
        let heads = table.dims()[1];
        let rows = table.select(0, self.buckets.clone()).reshape([self.length, self.length, heads]);
        rows.permute([2, 0, 1]).unsqueeze()
    }
}

/// Added to the score of a padding key: its weight underflows to exactly 0.
const MASKED: f32 = -1e30;

/// The bucket of key position `key` seen from `query` (Raffel et al. 2020, section 2.1; bidirectional).
///
/// ```text
/// half = num_buckets / 2, exact = half / 2, d = |key - query|
/// d                                                                          if d < exact
/// min(exact + floor(ln(d / exact) / ln(max_distance / exact) * exact), half - 1)   otherwise
/// plus half if key > query
/// ```
pub fn relative_position_bucket(query: usize, key: usize, num_buckets: usize, max_distance: usize) -> usize {
    let half = num_buckets / 2;
    let exact = half / 2;
    let distance = query.abs_diff(key);
    let side = if key > query { half } else { 0 };
    if distance < exact {
        return side + distance;
    }
    // f32 like the reference, which at powers of two decides on which side of a border rounding falls
    let (distance, first) = (distance as f32, exact as f32);
    let log_ratio = (distance / first).ln() / (max_distance as f64 / exact as f64).ln() as f32;
    side + (exact + (log_ratio * (half - exact) as f32) as usize).min(half - 1)
}

/// `softmax(q k^T + bias) v`, without the usual scale `1 / sqrt(K)`: T5 folds it into the initialisation.
#[derive(Debug)]
struct Attention {
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    /// [buckets, H]
    bias_table: Param<2>,
    heads: usize,
}

impl Attention {
    fn new(w: &Weights, config: &Umt5Config) -> Self {
        let (dim, heads) = (config.d_model, config.num_heads);
        let inner = heads * config.d_kv;
        let normal = |variance_inverse: usize| Init::Normal((variance_inverse as f64).powf(-0.5));
        let linear = |name, inputs, outputs, init| Linear::new_without_bias(&w.sub(name), inputs, outputs, init);
        let buckets = config.relative_attention_num_buckets;
        Self {
            q: linear("q", dim, inner, normal(dim * config.d_kv)),
            k: linear("k", dim, inner, normal(dim)),
            v: linear("v", dim, inner, normal(dim)),
            o: linear("o", inner, dim, normal(inner)),
            bias_table: w.sub("relative_attention_bias").param("weight", [buckets, heads], normal(dim)),
            heads,
        }
    }

    /// x [B, L, D] -> [B, L, D]; scores in f32
    fn forward(&self, x: Tensor<3>, positions: &Positions) -> Tensor<3> {
        let dtype = x.dtype();
        let bias = cast(positions.bias(self.bias_table.suit(&x)), DType::F32);
        let q = self.split_heads(self.q.forward(x.clone()));
        let k = self.split_heads(self.k.forward(x.clone()));
        let v = self.split_heads(self.v.forward(x));
        let mut scores = cast(q.matmul(k.swap_dims(2, 3)), DType::F32) + bias;
        if let Some(padding) = &positions.padding {
            scores = scores + padding.clone();
        }
        let mixed = cast(softmax(scores, 3), dtype).matmul(v);
        let [batch, heads, length, features] = mixed.dims();
        self.o.forward(mixed.swap_dims(1, 2).reshape([batch, length, heads * features]))
    }

    fn forward_each(&self, x: Tensor<3>, lengths: &[usize], bias: &Tensor<4>) -> Tensor<3> {
        let (q, k, v) = (self.q.forward(x.clone()), self.k.forward(x.clone()), self.v.forward(x));
        let mut from = 0;
        let mixed = lengths.iter().map(|&length| {
            let part = |x: &Tensor<3>| self.split_heads(x.clone().narrow(1, from, length));
            // a bias depends on two positions, not on the length
            let bias = bias.clone().narrow(2, 0, length).narrow(3, 0, length);
            let scores = part(&q).matmul(part(&k).swap_dims(2, 3)) + bias;
            let mixed = softmax(scores, 3).matmul(part(&v));
            from += length;
            let [_, heads, _, features] = mixed.dims();
            mixed.swap_dims(1, 2).reshape([1, length, heads * features])
        });
        self.o.forward(Tensor::cat(mixed.collect(), 1))
    }

    /// [B, L, H * K] -> [B, H, L, K]
    fn split_heads(&self, x: Tensor<3>) -> Tensor<4> {
        let [batch, length, inner] = x.dims();
        x.reshape([batch, length, self.heads, inner / self.heads]).swap_dims(1, 2)
    }
}

/// `wo(gelu(wi_0 x) * wi_1 x)`
#[derive(Debug)]
struct FeedForward {
    gate: Linear,
    value: Linear,
    output: Linear,
}

impl FeedForward {
    fn new(w: &Weights, config: &Umt5Config) -> Self {
        let (dim, hidden) = (config.d_model, config.d_ff);
        let normal = |fan_in: usize| Init::Normal((fan_in as f64).powf(-0.5));
        Self {
            gate: Linear::new_without_bias(&w.sub("wi_0"), dim, hidden, normal(dim)),
            value: Linear::new_without_bias(&w.sub("wi_1"), dim, hidden, normal(dim)),
            output: Linear::new_without_bias(&w.sub("wo"), hidden, dim, normal(hidden)),
        }
    }

    /// x [B, L, D] -> [B, L, D]
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let gate = gelu_tanh(self.gate.forward(x.clone()));
        self.output.forward(gate * self.value.forward(x))
    }
}
