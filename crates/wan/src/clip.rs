//! The image encoder of Wan2.1 image-to-video: the vision half of CLIP (Radford et al. 2021), a transformer over patches.
//!
//! Legend: `B` images, `S` side of an image, `I` = 1 + (S / patch)^2 tokens, `D` features.

use crate::config::{check_sizes, read_json};
use crate::error::{Error, Result};
use crate::layers::{AffineNorm, Linear, gelu_exact};
use crate::param::Param;
use crate::transformer::attention::attention;
use crate::weights::{Init, WeightFiles, Weights};
use burn::tensor::activation::sigmoid;
use burn::tensor::{DType, Device, Tensor, TensorData};
use serde::Deserialize;
use std::path::Path;

/// Folder of the encoder in a model, and of how its images are prepared.
pub const IMAGE_ENCODER: &str = "image_encoder";
/// See [`IMAGE_ENCODER`].
pub const IMAGE_PROCESSOR: &str = "image_processor";

/// `image_encoder/config.json`; keys that do not matter here are ignored.
#[derive(Debug, Clone, Deserialize)]
pub struct ClipVisionConfig {
    /// D
    pub hidden_size: usize,
    /// Features between the two layers of the feed-forward.
    pub intermediate_size: usize,
    /// Layers of the encoder, of which the last is not used here.
    pub num_hidden_layers: usize,
    /// Heads, which divide D.
    pub num_attention_heads: usize,
    /// S
    pub image_size: usize,
    /// Pixels of a patch in height and width.
    pub patch_size: usize,
    /// Between the two layers of the feed-forward.
    #[serde(default)]
    pub hidden_act: Activation,
    /// In the norms.
    #[serde(default = "eps")]
    pub layer_norm_eps: f64,
}

fn eps() -> f64 {
    1e-5
}

/// What is between the layers of the feed-forward.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// The exact one.
    Gelu,
    /// `x sigmoid(1.702 x)`
    #[default]
    QuickGelu,
}

/// What matters of `image_processor/preprocessor_config.json`.
#[derive(Debug, Clone, Deserialize)]
struct Preprocessor {
    image_mean: [f32; 3],
    image_std: [f32; 3],
}

impl ClipVisionConfig {
    /// Of the model in a folder.
    ///
    /// # Errors
    /// A file that cannot be read, or sizes that do not fit together.
    pub fn of_folder(dir: &Path) -> Result<Self> {
        let path = dir.join(IMAGE_ENCODER).join("config.json");
        let config: Self = read_json(&path)?;
        config.check().map_err(|reason| Error::invalid(&path, reason, "compare with the config.json of the original model"))?;
        Ok(config)
    }

    fn check(&self) -> std::result::Result<(), String> {
        check_sizes(&[
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("image_size", self.image_size),
            ("patch_size", self.patch_size),
        ])?;
        let (side, patch) = (self.image_size, self.patch_size);
        if !side.is_multiple_of(patch) || side > 4096 {
            return Err(format!("`image_size` is {side}: expected a multiple of `patch_size`, {patch}, up to 4096"));
        }
        if !self.hidden_size.is_multiple_of(self.num_attention_heads) {
            return Err(format!(
                "`hidden_size` is {}, no multiple of `num_attention_heads`, {}",
                self.hidden_size, self.num_attention_heads
            ));
        }
        Ok(())
    }

    /// That of Wan2.1: ViT-H of 14x14 patches.
    pub fn vit_h() -> Self {
        Self {
            hidden_size: 1280,
            intermediate_size: 5120,
            num_hidden_layers: 32,
            num_attention_heads: 16,
            image_size: 224,
            patch_size: 14,
            hidden_act: Activation::Gelu,
            layer_norm_eps: eps(),
        }
    }

    /// I
    pub fn num_tokens(&self) -> usize {
        1 + (self.image_size / self.patch_size).pow(2)
    }

    /// Parameters of the whole encoder, with the layer that is not used.
    pub fn num_parameters(&self) -> usize {
        let (d, e) = (self.hidden_size, self.intermediate_size);
        let layer = 4 * (d * d + d) + 2 * d * e + d + e + 4 * d;
        d + 3 * d * self.patch_size.pow(2) + self.num_tokens() * d + 4 * d + self.num_hidden_layers * layer
    }
}

/// The encoder, always in f32.
#[derive(Debug)]
pub struct ClipVision {
    /// Sizes.
    pub config: ClipVisionConfig,
    preprocessor: Preprocessor,
    class: Param<1>,
    patches: Linear,
    positions: Param<2>,
    norm: AffineNorm,
    /// All but the last.
    layers: Vec<Layer>,
}

impl ClipVision {
    /// Reads `image_encoder/` and `image_processor/` of a model folder.
    ///
    /// # Errors
    /// A missing or broken file, weights of another encoder.
    pub fn load(dir: &Path, device: &Device) -> Result<Self> {
        let config = ClipVisionConfig::of_folder(dir)?;
        let preprocessor: Preprocessor = read_json(&dir.join(IMAGE_PROCESSOR).join("preprocessor_config.json"))?;
        let files = WeightFiles::open_folder(&dir.join(IMAGE_ENCODER), "model")?;
        let is_unused = |name: &str| {
            name.contains("post_layernorm")
                || name.contains(&format!("encoder.layers.{}.", config.num_hidden_layers - 1))
                || name.ends_with("position_ids")
        };
        let unused: Vec<String> = files.names().filter(|name| is_unused(name)).map(str::to_owned).collect();
        let unused: Vec<&str> = unused.iter().map(String::as_str).collect();
        let build = |w: Weights| Self::new(config.clone(), preprocessor.clone(), w, &unused);
        files.check(&Weights::declared(build)?, &unused)?;
        build(Weights::from_files(files, device, DType::F32))
    }

    fn new(config: ClipVisionConfig, preprocessor: Preprocessor, w: Weights, unused: &[&str]) -> Result<Self> {
        let vision = w.sub("vision_model");
        let (embeddings, dim, patch) = (vision.sub("embeddings"), config.hidden_size, config.patch_size);
        let encoder = Self {
            class: embeddings.param("class_embedding", [dim], Init::Zeros),
            patches: Linear::from_image_conv(&embeddings.sub("patch_embedding"), [dim, 3, patch, patch]),
            positions: embeddings.sub("position_embedding").param("weight", [config.num_tokens(), dim], Init::Zeros),
            norm: AffineNorm::new(&vision.sub("pre_layrnorm"), dim, config.layer_norm_eps), // the name in the file
            layers: (0..config.num_hidden_layers - 1).map(|i| Layer::new(&vision.sub("encoder.layers").sub(i), &config)).collect(),
            preprocessor,
            config,
        };
        w.finish(unused)?;
        Ok(encoder)
    }

    /// Images [B, 3, S, S] in [0, 1] -> [B, I, D]: the tokens before the last layer, as the networks of Wan2.1 were trained with.
    ///
    /// # Panics
    /// If the images have another size.
    pub fn forward(&self, images: Tensor<4>) -> Tensor<3> {
        let [batch, channels, height, width] = images.dims();
        let (side, patch, dim) = (self.config.image_size, self.config.patch_size, self.config.hidden_size);
        assert_eq!([channels, height, width], [3, side, side], "images of another size");
        let per_channel = |values: [f32; 3]| Tensor::<4>::from_data(TensorData::new(values.to_vec(), [1, 3, 1, 1]), &images.device());
        let pixels = (images.clone() - per_channel(self.preprocessor.image_mean)) / per_channel(self.preprocessor.image_std);
        let count = side / patch;
        let pixels = pixels.reshape([batch * 3, count, patch, count, patch]).swap_dims(2, 3);
        let pixels =
            pixels.reshape([batch, 3, count * count, patch * patch]).swap_dims(1, 2).reshape([batch, count * count, 3 * patch * patch]);
        let patches = self.patches.forward(pixels);
        let class = self.class.suit(&patches).reshape([1, 1, dim]).expand([batch, 1, dim]);
        let tokens = Tensor::cat(vec![class, patches], 1) + self.positions.suit(&images).unsqueeze();
        self.layers.iter().fold(self.norm.forward(tokens), |x, layer| layer.forward(x))
    }
}

/// Pre-norm self-attention, then feed-forward.
#[derive(Debug)]
struct Layer {
    norm_1: AffineNorm,
    q: Linear,
    k: Linear,
    v: Linear,
    out: Linear,
    norm_2: AffineNorm,
    up: Linear,
    down: Linear,
    heads: usize,
    activation: Activation,
}

impl Layer {
    fn new(w: &Weights, config: &ClipVisionConfig) -> Self {
        let (dim, attention, mlp) = (config.hidden_size, w.sub("self_attn"), w.sub("mlp"));
        let square = |name| Linear::new(&attention.sub(name), dim, dim);
        let norm = |name| AffineNorm::new(&w.sub(name), dim, config.layer_norm_eps);
        Self {
            norm_1: norm("layer_norm1"),
            q: square("q_proj"),
            k: square("k_proj"),
            v: square("v_proj"),
            out: square("out_proj"),
            norm_2: norm("layer_norm2"),
            up: Linear::new(&mlp.sub("fc1"), dim, config.intermediate_size),
            down: Linear::new(&mlp.sub("fc2"), config.intermediate_size, dim),
            heads: config.num_attention_heads,
            activation: config.hidden_act,
        }
    }

    /// [B, I, D] -> same
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let [batch, tokens, dim] = x.dims();
        let heads = |x: Tensor<3>| x.reshape([batch, tokens, self.heads, dim / self.heads]).swap_dims(1, 2);
        let h = self.norm_1.forward(x.clone());
        let mixed = attention(heads(self.q.forward(h.clone())), heads(self.k.forward(h.clone())), heads(self.v.forward(h)), None);
        let x = x + self.out.forward(mixed.swap_dims(1, 2).reshape([batch, tokens, dim]));
        let h = self.up.forward(self.norm_2.forward(x.clone()));
        let h = match self.activation {
            Activation::Gelu => gelu_exact(h),
            Activation::QuickGelu => h.clone() * sigmoid(h.mul_scalar(1.702)),
        };
        x + self.down.forward(h)
    }
}
