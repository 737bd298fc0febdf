//! `recipes/pretrain_moving_shapes.toml`.

use crate::optimizer::AdamWConfig;
use serde::{Deserialize, Serialize};
use serde_json::json;
use shapes::World;
use std::path::{Path, PathBuf};
use wan::error::Error;
use wan::transformer::TransformerConfig;
use wan::umt5::Umt5Config;
use wan::vae::VaeConfig;

/// A complete pretraining run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PretrainSettings {
    /// Seed of everything random.
    pub seed: u64,
    /// The model folder to write.
    pub output: PathBuf,
    /// The clips.
    pub data: DataSettings,
    /// Stage 1.
    pub autoencoder: StageSettings<VaeConfig>,
    /// Sizes of the text encoder; `vocab_size` is set by the tokenizer.
    pub text_encoder: Umt5Config,
    /// Stage 2.
    pub flow: StageSettings<TransformerConfig>,
    /// Shift of the noise levels in training, and of the model's scheduler.
    pub shift: f64,
}

/// The training clips.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataSettings {
    /// What the clips show: `shapes` or `signs`.
    #[serde(default, with = "world")]
    pub world: World,
    /// Frames, 4k + 1.
    pub num_frames: usize,
    /// Pixels.
    pub height: usize,
    /// Pixels.
    pub width: usize,
    /// Clips rendered per caption.
    pub clips_per_caption: usize,
    /// Probability that a word of the caption is replaced by a random one of its kind: what makes the base model imperfect.
    pub caption_noise: f64,
    /// Probability that the caption is dropped, for classifier-free guidance.
    pub caption_dropout: f64,
}

/// A world by its name.
mod world {
    use serde::de::Error as _;
    use serde::{Deserialize, Deserializer, Serializer};
    use shapes::World;

    pub(super) fn serialize<S: Serializer>(world: &World, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(world.name())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<World, D::Error> {
        let name = String::deserialize(deserializer)?;
        let found = World::ALL.into_iter().find(|world| world.name() == name);
        found.ok_or_else(|| D::Error::custom(format!("unknown world `{name}`, expected `shapes` or `signs`")))
    }
}

/// One stage: what is trained and how.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StageSettings<C> {
    /// Optimizer steps.
    pub steps: usize,
    /// Samples per step.
    pub batch_size: usize,
    /// Learning rate warms up over 2 % of the steps and falls to 2 % along a cosine.
    pub optimizer: AdamWConfig,
    /// Decay of the moving average that is kept as the result.
    pub ema_decay: f64,
    /// Steps between saves of the stage's progress.
    pub save_every: usize,
    /// Sizes of the network.
    pub config: C,
}

impl<C> StageSettings<C> {
    /// Learning rate of a step.
    pub fn learning_rate(&self, step: usize) -> f64 {
        let progress = step as f64 / self.steps as f64;
        let warmup = (step as f64 + 1.0) / (0.02 * self.steps as f64).max(1.0);
        let cosine = 0.5 + 0.5 * (std::f64::consts::PI * progress).cos();
        self.optimizer.learning_rate * warmup.min(1.0) * (0.02 + 0.98 * cosine)
    }
}

impl PretrainSettings {
    /// Reads a recipe.
    ///
    /// # Errors
    /// A file that cannot be read, or the first key that does not fit, with its place.
    pub fn load(path: &Path) -> Result<Self, Error> {
        let text = std::fs::read_to_string(path).map_err(|e| Error::read(path, e))?;
        toml::from_str(&text).map_err(|e| Error::invalid(path, e.to_string(), "compare with recipes/pretrain_moving_shapes.toml"))
    }

    /// The scheduler file of the written model: what the Wan pipeline uses.
    pub(super) fn scheduler_config(&self) -> serde_json::Value {
        json!({
            "_class_name": "UniPCMultistepScheduler",
            "_diffusers_version": "0.37.0",
            "num_train_timesteps": 1000,
            "prediction_type": "flow_prediction",
            "predict_x0": true,
            "solver_order": 2,
            "solver_type": "bh2",
            "lower_order_final": true,
            "use_flow_sigmas": true,
            "flow_shift": self.shift,
            "final_sigmas_type": "zero",
            "timestep_spacing": "linspace",
        })
    }
}

/// model_index.json of a Wan text-to-video pipeline.
pub(super) fn model_index() -> serde_json::Value {
    json!({
        "_class_name": "WanPipeline",
        "_diffusers_version": "0.37.0",
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "T5Tokenizer"],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "vae": ["diffusers", "AutoencoderKLWan"],
    })
}
