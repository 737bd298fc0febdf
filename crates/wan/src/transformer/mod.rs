//! `WanTransformer3DModel`: the velocity network of Wan2.1 and Wan2.2 (with per-token timesteps, of TI2V; with more channels read than
//! written, and in Wan2.1 with an image beside the text, of image-to-video).
//!
//! Legend: `B` batch, `C` latent channels, `F` latent frames, `H`, `W` latent height and width, `L` tokens,
//! `D` = heads x head_dim, `T` text tokens, `I` image tokens, `S` = 1, or L when every token has its own timestep.

pub mod attention;
pub mod block;
pub mod config;
#[cfg(feature = "gpu")]
mod fused;
mod image;
pub mod patch;
pub mod recompute;
pub mod rope;
#[cfg(test)]
mod tests;
pub mod time;

use crate::error::Result;
use crate::layers::{Linear, LinearSite, cast, modulated_norm};
use crate::ops::{Modulation, gelu_tanh};
use crate::original::under_diffusers_names;
use crate::param::{Param, ParamSet};
use crate::text::PromptEmbeds;
use crate::weights::{Init, WeightFiles, Weights};
use block::{Block, TextKv};
use burn::tensor::{DType, Device, Tensor, TensorData};
pub use config::TransformerConfig;
use image::ImageEmbedder;
use patch::PatchGrid;
use rope::Rope;
use std::path::Path;
use std::sync::{PoisonError, RwLock};
use time::TimeEmbedding;

/// The velocity network v(x, t, text).
#[derive(Debug)]
pub struct WanTransformer {
    /// config.json
    pub config: TransformerConfig,
    /// All weights by name.
    pub params: ParamSet,
    /// All linear layers, where adapters can be put.
    pub linears: Vec<LinearSite>,
    patch_embedding: Linear,
    time: TimeEmbedding,
    text_1: Linear,
    text_2: Linear,
    image: Option<ImageEmbedder>,
    blocks: Vec<Block>,
    scale_shift_table: Param<3>,
    proj_out: Linear,
    dtype: DType,
    /// Dtype of the activations: that of the frozen weights, unless [`with_activations`](Self::with_activations) says otherwise.
    activations: RwLock<DType>,
}

/// What cross-attention needs of the text. It does not depend on the timestep: a rollout computes it once.
#[derive(Debug, Clone)]
pub struct TextContext {
    blocks: Vec<TextKv>,
    /// Additive bias on the keys [1, 1, 1, T], if the zero padding was collapsed into the last key.
    bias: Option<Tensor<4>>,
    /// Where it comes from, and the row of that of each sample: enough to compute it again.
    prompts: PromptEmbeds,
    /// The images, one for each prompt [P, I, image_dim].
    images: Option<Tensor<3>>,
    rows: Vec<usize>,
}

impl TextContext {
    /// The samples of the given indices, in that order; an index may repeat.
    ///
    /// # Panics
    /// If there is no index.
    pub fn select(&self, indices: &[usize]) -> Self {
        assert!(!indices.is_empty(), "an empty selection is not a batch");
        let rows = indices.iter().map(|&i| self.rows[i]).collect();
        let blocks = self.blocks.iter().map(|kv| kv.select(indices)).collect();
        Self { blocks, rows, ..self.clone() }
    }
}

impl WanTransformer {
    /// Reads `DIR/config.json` and the weights beside it, under the names of diffusers or those of the original release.
    ///
    /// # Errors
    /// A device that cannot compute in `dtype`; unreadable files; weights that do not fit the config, all listed by name.
    pub fn load(dir: &Path, device: &Device, dtype: DType) -> Result<Self> {
        crate::device::check_dtype(device, dtype)?;
        let config = TransformerConfig::load(&dir.join("config.json"))?;
        let files = under_diffusers_names(WeightFiles::open_folder(dir, "diffusion_pytorch_model")?)?;
        files.check(&Weights::declared(|w| Self::new(config.clone(), w, dtype))?, &[])?;
        Self::new(config, Weights::from_files(files, device, dtype), dtype)
    }

    /// The linear layers of a network of `config`, without its weights: enough to read an adapter.
    ///
    /// # Errors
    /// None for sizes that were checked.
    pub fn sites(config: TransformerConfig) -> Result<Vec<LinearSite>> {
        let mut sites = Vec::new();
        Weights::declared(|w| Self::new(config, w, DType::BF16).map(|network| sites = network.linears))?;
        Ok(sites)
    }

    /// Builds the network from any source of weights.
    ///
    /// # Errors
    /// Weights that do not fit the config.
    pub fn new(config: TransformerConfig, w: Weights, dtype: DType) -> Result<Self> {
        let dim = config.dim();
        let [pt, ph, pw] = config.patch_size;
        let condition = w.sub("condition_embedder");
        let patch_embedding = Linear::from_conv(&w.sub("patch_embedding"), [dim, config.in_channels, pt, ph, pw]);
        let time = TimeEmbedding::new(&condition, &config);
        let text = condition.sub("text_embedder");
        let text_1 = Linear::new(&text.sub("linear_1"), config.text_dim, dim);
        let text_2 = Linear::new(&text.sub("linear_2"), dim, dim);
        let image = config.image_dim.map(|features| ImageEmbedder::new(&condition.sub("image_embedder"), features, dim));
        let blocks = (0..config.num_layers).map(|i| Block::new(&w.sub("blocks").sub(i), &config)).collect();
        let table_std = 1.0 / (dim as f64).sqrt();
        let scale_shift_table = w.param_f32("scale_shift_table", [1, 2, dim], Init::Normal(table_std));
        let proj_out = Linear::new(&w.sub("proj_out"), dim, config.out_channels * pt * ph * pw);
        let (params, linears) = w.finish(&[])?;
        let activations = RwLock::new(dtype);
        Ok(Self {
            config,
            params,
            linears,
            patch_embedding,
            time,
            text_1,
            text_2,
            image,
            blocks,
            scale_shift_table,
            proj_out,
            dtype,
            activations,
        })
    }

    /// Runs `work` with activations of another dtype over the same weights: what the rounding of activations does is the difference.
    pub fn with_activations<R>(&self, dtype: DType, work: impl FnOnce() -> R) -> R {
        let set = |dtype| std::mem::replace(&mut *self.activations.write().unwrap_or_else(PoisonError::into_inner), dtype);
        let before = set(dtype);
        let result = work();
        set(before);
        result
    }

    fn activations(&self) -> DType {
        *self.activations.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keys and values of the text for every block.
    ///
    /// The reference pads the text with zero rows to `padded_length` *after* the encoder, and the padded rows take part in
    /// the attention. They are all equal, so one key with additive bias `ln(count)` stands for all of them, exactly.
    /// `record` says whether gradients are to flow (an adapter may sit on the text projections).
    pub fn text_context(&self, text: &PromptEmbeds, record: bool) -> TextContext {
        let (rows, bias) = text_rows(text);
        let hidden = self.embed_text(if record { rows.autodiff() } else { rows });
        let blocks = self.blocks.iter().map(|block| block.text_kv(hidden.clone())).collect();
        TextContext { blocks, bias, prompts: text.clone(), images: None, rows: (0..text.batch_size()).collect() }
    }

    /// The same with an image for each text: `images` [B, I, image_dim], as the image encoder gives them. Without, the image branch adds nothing.
    ///
    /// # Panics
    /// If the network has no image branch, or the number of images is not that of the texts.
    pub fn text_and_image_context(&self, text: &PromptEmbeds, images: Tensor<3>, record: bool) -> TextContext {
        assert_eq!(images.dims()[0], text.batch_size(), "an image for each text");
        let mut context = self.text_context(text, record);
        let hidden = self.embed_image(if record { images.clone().autodiff() } else { images.clone() });
        for (kv, block) in context.blocks.iter_mut().zip(&self.blocks) {
            kv.image = Some(block.image_keys_values([hidden.clone(), hidden.clone()]));
        }
        TextContext { images: Some(images), ..context }
    }

    /// The images as the blocks read them: [B, I, image_dim] -> [B, I, D].
    fn embed_image(&self, images: Tensor<3>) -> Tensor<3> {
        let embedder = self.image.as_ref().expect("a network with an image branch");
        embedder.forward(cast(images, self.activations()))
    }

    /// The text as the blocks read it: [B, T, text_dim] -> [B, T, D].
    fn embed_text(&self, rows: Tensor<3>) -> Tensor<3> {
        self.text_2.forward(gelu_tanh(self.text_1.forward(cast(rows, self.activations()))))
    }

    /// Velocity v(x, t, text), same shape as the latents (floor-cropped to whole patches), f32.
    ///
    /// `latents` [B, C, F, H, W]; gradients are recorded iff it is an autodiff tensor. `timesteps` on the 0..1000 scale: one
    /// per sample (B values) or one per token (B x L values).
    pub fn forward(&self, latents: Tensor<5>, timesteps: &[f64], text: &TextContext) -> Tensor<5> {
        let sinusoids = time::sinusoids(timesteps, latents.dims()[0], self.config.freq_dim, &latents.device());
        self.forward_from_sinusoids(latents, sinusoids, text)
    }

    /// As [`forward`](Self::forward), with the timesteps' sinusoids [B, S, freq_dim] given.
    pub fn forward_from_sinusoids(&self, latents: Tensor<5>, sinusoids: Tensor<3>, text: &TextContext) -> Tensor<5> {
        let grid = PatchGrid::new(&self.config, latents.dims());
        let rope = Rope::new(&self.config, &grid, &latents.device());
        let Embedded { mut hidden, temb, modulation } = self.embed(latents, sinusoids, &grid);
        for (block, kv) in self.blocks.iter().zip(&text.blocks) {
            hidden = block.forward(hidden, &modulation, &rope, kv, text.bias.as_ref());
        }
        grid.unpatchify(cast(self.head(hidden, &temb), DType::F32))
    }

    /// What the blocks start from.
    fn embed(&self, latents: Tensor<5>, sinusoids: Tensor<3>, grid: &PatchGrid) -> Embedded {
        let tokens = grid.patchify(latents);
        let sinusoids = if tokens.is_autodiff() { sinusoids.autodiff() } else { sinusoids };
        let hidden = self.patch_embedding.forward(cast(tokens, self.activations()));
        let (temb, modulation) = self.time.forward(sinusoids, self.activations());
        Embedded { hidden, temb, modulation }
    }

    /// hidden [B, L, D], temb [B, S, D] (itself, not its projection) -> [B, L, pt ph pw C].
    ///
    /// ```text
    /// proj_out(LN(x) (1 + scale) + shift),   (shift, scale) = scale_shift_table + temb
    /// ```
    fn head(&self, hidden: Tensor<3>, temb: &Tensor<3>) -> Tensor<3> {
        self.head_of(hidden, [temb, temb])
    }

    /// As [`head`](Self::head), with the temb of the shift and that of the scale.
    fn head_of(&self, hidden: Tensor<3>, temb: [&Tensor<3>; 2]) -> Tensor<3> {
        let table = self.scale_shift_table.suit(&hidden);
        let part = |i: usize| table.clone().narrow(1, i, 1) + cast(temb[i].clone(), DType::F32);
        let (shift, scale) = (part(0), part(1));
        let normed = modulated_norm(hidden, scale, shift, Modulation { offset: 1.0, eps: self.config.eps });
        self.proj_out.forward(cast(normed, self.activations()))
    }

    /// Tokens L of one sample of latents [B, C, F, H, W].
    pub fn num_tokens(&self, latents: [usize; 5]) -> usize {
        PatchGrid::new(&self.config, latents).num_tokens()
    }

    /// The dtype of the frozen weights.
    pub fn dtype(&self) -> DType {
        self.dtype
    }
}

/// Tokens [B, L, D], their timesteps' embedding [B, S, D] and the blocks' modulation [B, S, 6, D].
struct Embedded {
    hidden: Tensor<3>,
    temb: Tensor<3>,
    modulation: Tensor<4>,
}

/// The rows of the text [B, T, text_dim], with the zero padding collapsed into the last one, and the bias of the keys that accounts for it.
fn text_rows(text: &PromptEmbeds) -> (Tensor<3>, Option<Tensor<4>>) {
    let [batch, length, dim] = text.embeds.dims();
    let padding = text.padded_length.saturating_sub(length);
    let mut rows = text.embeds.clone();
    let mut bias = None;
    if padding > 0 {
        let device = rows.device();
        rows = Tensor::cat(vec![rows, Tensor::zeros([batch, 1, dim], &device)], 1);
        let mut values = vec![0.0_f32; length + 1];
        values[length] = (padding as f64).ln() as f32;
        bias = Some(Tensor::<1>::from_data(TensorData::new(values, [length + 1]), &device.inner()).reshape([1, 1, 1, length + 1]));
    }
    (rows, bias)
}
