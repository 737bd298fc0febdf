//! One transformer block: modulated self-attention, cross-attention to the text, modulated feed-forward.

use super::TransformerConfig;
use super::attention::attention;
use super::rope::Rope;
use crate::layers::{Linear, RmsNorm, cast, modulated_norm};
use crate::ops::{self, Modulation, gelu_tanh};
use crate::param::Param;
use crate::weights::{Init, Weights};
use burn::tensor::{DType, Int, Tensor};

/// Keys and values of the text in one block, [B, T, D] each, and those of an image [B, I, D], if there is one.
#[derive(Debug, Clone)]
pub struct TextKv {
    pub(super) text: KeyValues,
    pub(super) image: Option<KeyValues>,
}

/// Keys and values of what is attended to.
#[derive(Debug, Clone)]
pub(super) struct KeyValues {
    pub(super) keys: Tensor<3>,
    pub(super) values: Tensor<3>,
}

impl TextKv {
    /// The samples of the given indices, in that order.
    pub fn select(&self, indices: &[usize]) -> Self {
        Self { text: self.text.select(indices), image: self.image.as_ref().map(|image| image.select(indices)) }
    }
}

impl KeyValues {
    pub(super) fn select(&self, indices: &[usize]) -> Self {
        let rows: Vec<i32> = indices.iter().map(|&i| i as i32).collect();
        let rows = Tensor::<1, Int>::from_ints(rows.as_slice(), &self.keys.device());
        let pick = |x: &Tensor<3>| x.clone().select(0, rows.clone());
        Self { keys: pick(&self.keys), values: pick(&self.values) }
    }
}

/// ```text
/// x += gate_1 * self_attention(LN(x) (1 + scale_1) + shift_1)
/// x += cross_attention(LN_affine(x), text, image)
/// x += gate_2 * ffn(LN(x) (1 + scale_2) + shift_2)
/// (shift_1, scale_1, gate_1, shift_2, scale_2, gate_2) = scale_shift_table + time projection
/// ```
///
/// Norms, modulation and gated sums are f32 whatever the model's dtype.
#[derive(Debug)]
pub struct Block {
    scale_shift_table: Param<3>,
    pub(super) attn1: Projections,
    attn2: Projections,
    image: Option<ImageProjections>,
    norm2_weight: Param<1>,
    norm2_bias: Param<1>,
    ffn_in: Linear,
    ffn_out: Linear,
    eps: f64,
}

impl Block {
    /// From the sub-tree `blocks.N`.
    pub fn new(w: &Weights, config: &TransformerConfig) -> Self {
        let dim = config.dim();
        let norm2 = w.sub("norm2");
        let table_std = 1.0 / (dim as f64).sqrt();
        Self {
            scale_shift_table: w.param_f32("scale_shift_table", [1, 6, dim], Init::Normal(table_std)),
            attn1: Projections::new(&w.sub("attn1"), config),
            attn2: Projections::new(&w.sub("attn2"), config),
            image: config.image_dim.map(|_| ImageProjections::new(&w.sub("attn2"), config)),
            norm2_weight: norm2.param_f32("weight", [dim], Init::Ones),
            norm2_bias: norm2.param_f32("bias", [dim], Init::Zeros),
            ffn_in: Linear::new(&w.sub("ffn.net.0.proj"), dim, config.ffn_dim),
            ffn_out: Linear::new(&w.sub("ffn.net.2"), config.ffn_dim, dim),
            eps: config.eps,
        }
    }

    /// Keys and values of the embedded text [B, T, D].
    pub fn text_kv(&self, text: Tensor<3>) -> TextKv {
        TextKv { text: self.text_keys_values([text.clone(), text]), image: None }
    }

    /// Keys of the first, values of the second.
    pub(super) fn text_keys_values(&self, [keys, values]: [Tensor<3>; 2]) -> KeyValues {
        KeyValues { keys: self.attn2.keys(keys, None), values: self.attn2.to_v.forward(values) }
    }

    /// The same of an embedded image [B, I, D].
    ///
    /// # Panics
    /// If the network has no image branch.
    pub(super) fn image_keys_values(&self, [keys, values]: [Tensor<3>; 2]) -> KeyValues {
        let image = self.image.as_ref().expect("a network with an image branch");
        KeyValues { keys: image.norm_k.forward(image.to_k.forward(keys)), values: image.to_v.forward(values) }
    }

    /// x [B, L, D], modulation [B, S, 6, D] -> [B, L, D].
    pub fn forward(&self, x: Tensor<3>, modulation: &Tensor<4>, rope: &Rope, text: &TextKv, text_bias: Option<&Tensor<4>>) -> Tensor<3> {
        let [shift_1, scale_1, gate_1, shift_2, scale_2, gate_2] = self.modulation(&x, modulation);
        let h = self.self_attention(self.modulated_norm(&x, shift_1, scale_1), rope);
        let x = gated_sum(x, h, gate_1);
        let x = x.clone() + self.cross_attention(self.affine_norm(&x), text, text_bias);
        let h = self.feed_forward(self.modulated_norm(&x, shift_2, scale_2));
        gated_sum(x, h, gate_2)
    }

    /// scale_shift_table + modulation [B, S, 6, D] as six tensors [B, S, D], f32.
    pub(super) fn modulation(&self, x: &Tensor<3>, modulation: &Tensor<4>) -> [Tensor<3>; 6] {
        let table = self.scale_shift_table.suit(x).unsqueeze_dim::<4>(1);
        let m = cast(modulation.clone(), DType::F32) + table;
        std::array::from_fn(|i| m.clone().narrow(2, i, 1).squeeze_dim::<3>(2))
    }

    /// LN(x) (1 + scale) + shift
    pub(super) fn modulated_norm(&self, x: &Tensor<3>, shift: Tensor<3>, scale: Tensor<3>) -> Tensor<3> {
        cast(modulated_norm(x.clone(), scale, shift, Modulation { offset: 1.0, eps: self.eps }), x.dtype())
    }

    /// LN_affine(x), in front of the cross-attention.
    pub(super) fn affine_norm(&self, x: &Tensor<3>) -> Tensor<3> {
        let (weight, bias) = (self.norm2_weight.suit(x).unsqueeze(), self.norm2_bias.suit(x).unsqueeze());
        cast(modulated_norm(x.clone(), weight, bias, Modulation { offset: 0.0, eps: self.eps }), x.dtype())
    }

    pub(super) fn feed_forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.ffn_out.forward(gelu_tanh(self.ffn_in.forward(x)))
    }

    pub(super) fn self_attention(&self, x: Tensor<3>, rope: &Rope) -> Tensor<3> {
        let p = &self.attn1;
        let (q, k) = (p.queries(x.clone(), Some(rope)), p.keys(x.clone(), Some(rope)));
        p.to_out.forward(p.attend(q, k, p.to_v.forward(x), None))
    }

    pub(super) fn cross_attention(&self, x: Tensor<3>, text: &TextKv, bias: Option<&Tensor<4>>) -> Tensor<3> {
        let (p, TextKv { text, image }) = (&self.attn2, text);
        let queries = p.queries(x, None);
        let Some(image) = image else { return p.to_out.forward(p.attend(queries, text.keys.clone(), text.values.clone(), bias)) };
        // two attentions with the same queries, added in front of the output projection
        let of_image = p.attend(queries.clone(), image.keys.clone(), image.values.clone(), None);
        p.to_out.forward(p.attend(queries, text.keys.clone(), text.values.clone(), bias) + of_image)
    }
}

/// x + gate h, summed in f32.
pub(super) fn gated_sum(x: Tensor<3>, h: Tensor<3>, gate: Tensor<3>) -> Tensor<3> {
    if ops::supports(&x) && ops::supports(&h) {
        return ops::gated_sum(x, h, gate);
    }
    let dtype = x.dtype();
    cast(cast(x, DType::F32) + cast(h, DType::F32) * gate, dtype)
}

/// The four projections of an attention layer and its query and key norms over all heads together.
#[derive(Debug)]
pub(super) struct Projections {
    pub(super) to_q: Linear,
    to_k: Linear,
    to_v: Linear,
    to_out: Linear,
    norm_q: RmsNorm,
    norm_k: RmsNorm,
    heads: usize,
}

/// Keys and values of the image in cross-attention.
#[derive(Debug)]
struct ImageProjections {
    to_k: Linear,
    to_v: Linear,
    norm_k: RmsNorm,
}

impl ImageProjections {
    fn new(w: &Weights, config: &TransformerConfig) -> Self {
        let dim = config.dim();
        Self {
            to_k: Linear::new(&w.sub("add_k_proj"), dim, dim),
            to_v: Linear::new(&w.sub("add_v_proj"), dim, dim),
            norm_k: RmsNorm::new(&w.sub("norm_added_k"), dim, config.eps),
        }
    }
}

impl Projections {
    fn new(w: &Weights, config: &TransformerConfig) -> Self {
        let dim = config.dim();
        Self {
            to_q: Linear::new(&w.sub("to_q"), dim, dim),
            to_k: Linear::new(&w.sub("to_k"), dim, dim),
            to_v: Linear::new(&w.sub("to_v"), dim, dim),
            to_out: Linear::new(&w.sub("to_out.0"), dim, dim),
            norm_q: RmsNorm::new(&w.sub("norm_q"), dim, config.eps),
            norm_k: RmsNorm::new(&w.sub("norm_k"), dim, config.eps),
            heads: config.num_attention_heads,
        }
    }

    /// The queries [B, L, D], rotated if there is a rope.
    pub(super) fn queries(&self, x: Tensor<3>, rope: Option<&Rope>) -> Tensor<3> {
        self.norm_and_rotate(&self.norm_q, self.to_q.forward(x), rope)
    }

    /// The keys [B, L, D], rotated if there is a rope.
    pub(super) fn keys(&self, x: Tensor<3>, rope: Option<&Rope>) -> Tensor<3> {
        self.norm_and_rotate(&self.norm_k, self.to_k.forward(x), rope)
    }

    fn norm_and_rotate(&self, norm: &RmsNorm, x: Tensor<3>, rope: Option<&Rope>) -> Tensor<3> {
        if ops::supports(&x) {
            return norm.forward_and_rotate(x, rope.map(Rope::tables));
        }
        let (dims, x) = (x.dims(), norm.forward(x));
        match rope {
            Some(rope) => rope.rotate(self.split_heads(x)).reshape(dims),
            None => x,
        }
    }

    /// q [B, L, D], k and v [B, T, D] -> [B, L, D], within each head.
    fn attend(&self, q: Tensor<3>, k: Tensor<3>, v: Tensor<3>, bias: Option<&Tensor<4>>) -> Tensor<3> {
        if ops::supports(&q) {
            return ops::attention(q, k, v, bias.cloned(), self.heads);
        }
        let dims = q.dims();
        let [q, k, v] = [q, k, v].map(|x| self.split_heads(x).swap_dims(1, 2));
        attention(q, k, v, bias).swap_dims(1, 2).reshape(dims)
    }

    /// [B, L, D] -> [B, L, heads, d]
    fn split_heads(&self, x: Tensor<3>) -> Tensor<4> {
        let [b, l, dim] = x.dims();
        x.reshape([b, l, self.heads, dim / self.heads])
    }
}
