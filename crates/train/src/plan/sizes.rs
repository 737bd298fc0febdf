//! The sizes a plan is made from: configs of a model folder, or of a released model that is not there.

use crate::policy::adapted_layers;
use crate::settings::{PolicySettings, Settings, SettingsError};
use serde::Serialize;
use std::path::{Path, PathBuf};
use wan::clip::ClipVisionConfig;
use wan::error::{Error, Result};
use wan::experts::Boundary;
use wan::image::ImageInput;
use wan::text::PromptTokenizer;
use wan::transformer::TransformerConfig;
use wan::umt5::Umt5Config;
use wan::vae::VaeConfig;

/// The velocity networks of the model that a recipe names.
#[derive(Debug, Clone)]
pub struct Networks {
    /// Its folder.
    pub dir: PathBuf,
    /// Whether the folder is there; else the sizes are those of a released model of this name.
    pub is_there: bool,
    /// The only one, or each of the two.
    pub transformer: TransformerConfig,
    /// Where the second network takes over, if there is one.
    pub boundary: Option<Boundary>,
    /// The autoencoder that their latents belong to.
    pub vae: VaeConfig,
}

impl Networks {
    /// Nothing if the model is not there, and its name none of a released one.
    ///
    /// # Errors
    /// A config that cannot be used.
    pub fn of(settings: &Settings) -> Result<Option<Self>> {
        let dir = settings.model_folder().unwrap_or_else(|_| settings.model.path.clone());
        let config = dir.join("transformer/config.json");
        if config.exists() {
            let (transformer, boundary) = (TransformerConfig::load(&config)?, Boundary::of_folder(&dir)?);
            let vae = VaeConfig::read(&dir.join("vae/config.json"))?;
            return Ok(Some(Self { dir, is_there: true, transformer, boundary, vae }));
        }
        let name = name_of(&dir);
        let released = TransformerConfig::released(&name);
        let (boundary, vae) = (Boundary::released(&name), VaeConfig::released(&name));
        Ok(released.map(|transformer| Self { dir, is_there: false, transformer, boundary, vae }))
    }

    /// One, or two of the same size.
    pub fn count(&self) -> u64 {
        networks(self.boundary)
    }
}

fn name_of(dir: &Path) -> String {
    dir.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// All networks of a model.
#[derive(Debug, Clone)]
pub struct ModelSizes {
    /// The velocity network, or each of the two.
    pub transformer: TransformerConfig,
    /// Where the second network takes over, if there is one.
    pub boundary: Option<Boundary>,
    /// The autoencoder.
    pub vae: VaeConfig,
    /// The text encoder.
    pub text_encoder: Umt5Config,
    /// The image encoder, if there is one.
    pub image_encoder: Option<ClipVisionConfig>,
    /// How images reach the network.
    pub image_input: ImageInput,
}

impl ModelSizes {
    /// Of the model that a recipe names: its configs, or the known sizes of a released model, recognised by the folder's name.
    ///
    /// # Errors
    /// A folder that is not there and has no known name; a config that cannot be used.
    pub fn of(settings: &Settings) -> Result<Self> {
        let Some(Networks { dir, is_there, transformer, boundary, vae }) = Networks::of(settings)? else {
            let dir = settings.model.path.as_path();
            let hint = "name a model folder, or a released model by its folder's name: `Wan2.1-T2V-1.3B-Diffusers`, `Wan2.1-T2V-14B-Diffusers`, `Wan2.1-I2V-14B-480P-Diffusers`, `Wan2.2-T2V-A14B-Diffusers`, `Wan2.2-I2V-A14B-Diffusers`, `Wan2.2-TI2V-5B-Diffusers`";
            return Err(Error::invalid(dir, "there is no `transformer/config.json`, and the name is none of a released model", hint));
        };
        if is_there {
            return Ok(Self {
                image_input: ImageInput::of_folder(&dir)?,
                image_encoder: transformer.image_dim.map(|_| ClipVisionConfig::of_folder(&dir)).transpose()?,
                transformer,
                boundary,
                vae,
                text_encoder: Umt5Config::load(&dir.join("text_encoder"))?,
            });
        }
        Ok(Self {
            image_input: ImageInput::new(&transformer, vae.is_residual),
            image_encoder: transformer.image_dim.map(|_| ClipVisionConfig::vit_h()),
            transformer,
            boundary,
            vae,
            text_encoder: Umt5Config::xxl(),
        })
    }

    /// Whether the videos of the recipe start with an image that is the first latent frame.
    pub(super) fn gives_first_frame(&self, settings: &Settings) -> bool {
        let prompts = |source| crate::prompts::load(source, "prompts.train").unwrap_or_default();
        self.image_input == ImageInput::FirstFrame && prompts(&settings.prompts.train).iter().any(|prompt| prompt.image.is_some())
    }

    /// Velocity networks: one, or two of the same size.
    pub fn networks(&self) -> u64 {
        networks(self.boundary)
    }
}

fn networks(boundary: Option<Boundary>) -> u64 {
    1 + u64::from(boundary.is_some())
}

/// What the optimizer updates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Trained {
    /// Linear layers that have an adapter.
    pub layers: u64,
    /// Parameters.
    pub parameters: u64,
    /// Whether all weights of the transformer are trained.
    pub full: bool,
    /// Whether linear layers of the feed-forward have adapters.
    pub feed_forward: bool,
}

impl Trained {
    /// Of a recipe's policy, in `networks` networks of the same sizes.
    ///
    /// # Errors
    /// An entry of `policy.target_modules` that matches no layer.
    pub fn of(settings: &Settings, transformer: &TransformerConfig, networks: u64) -> Result<Self, SettingsError> {
        let PolicySettings::Lora { rank, .. } = settings.policy else {
            let parameters = networks * transformer.num_parameters() as u64;
            return Ok(Self { layers: 0, parameters, full: true, feed_forward: true });
        };
        let layers = adapted_layers(settings, transformer)?;
        let parameters: u64 = layers.iter().map(|(_, inputs, outputs)| (rank * (inputs + outputs)) as u64).sum();
        let feed_forward = layers.iter().any(|(name, ..)| name.contains(".ffn."));
        Ok(Self { layers: networks * layers.len() as u64, parameters: networks * parameters, full: false, feed_forward })
    }
}

/// How long the text is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct TextLength {
    /// Prompts of training and evaluation, and the negative one; 0 if they are not known.
    pub prompts: u64,
    /// Tokens of all of them.
    pub tokens: u64,
    /// Tokens of the longest, which is what cross-attention sees, with one more for the padding.
    pub longest: u64,
    /// Whether tokenizer and prompts were there to be counted; if not, every prompt is as long as the recipe allows.
    pub counted: bool,
}

impl TextLength {
    /// Of the recipe's prompts, counted if its model and its files are there.
    pub fn of(settings: &Settings) -> Self {
        Self::count(settings).unwrap_or_else(|| {
            let longest = settings.sampling.max_sequence_length as u64;
            Self { prompts: 0, tokens: 0, longest, counted: false }
        })
    }

    fn count(settings: &Settings) -> Option<Self> {
        let tokenizer = PromptTokenizer::load(&settings.model_folder().ok()?.join("tokenizer")).ok()?;
        let mut prompts = crate::prompts::load(&settings.prompts.train, "prompts.train").ok()?;
        prompts.extend(crate::prompts::load(&settings.prompts.eval, "prompts.eval").ok()?.into_iter().take(settings.eval.num_prompts));
        let texts: Vec<String> = prompts.into_iter().map(|prompt| prompt.text).chain([settings.prompts.negative.clone()]).collect();
        let length = |text: &String| Some(tokenizer.encode(text, settings.sampling.max_sequence_length).ok()?.len() as u64);
        let lengths: Vec<u64> = texts.iter().map(length).collect::<Option<_>>()?;
        let longest = lengths.iter().copied().max().unwrap_or(1);
        Some(Self { prompts: lengths.len() as u64, tokens: lengths.iter().sum(), longest, counted: true })
    }
}
