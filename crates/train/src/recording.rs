//! Recorded transitions on disk: to compare log-probs, losses and gradients of two implementations, or of rollout and training.
//!
//! | tensor | shape |
//! |---|---|
//! | `latents`, `next_latents` | [N, C, F, H, W] |
//! | `step` | `[N]`, index into the schedule |
//! | `sigmas` | [S + 1], ends with 0 |
//! | `prompt_embeds`, optionally `negative_prompt_embeds` | [N, L, D] or [1, L, D], zero-padded |
//! | `old_log_prob`, `advantages` | `[N]` |
//! | `old_velocity`, for the normalised ratio and the KL mask only | [N, C, F, H, W] |
//! | `image_channels` or `first_frame`, and `image_features`, of videos that start with an image (`wan::image`) | [N, K, F, H, W], [N, C, 1, H, W], [N, I, D] |
//!
//! The header's metadata entry `flash_grpo` is the JSON of [`Header`].

use crate::error::{Error, Result};
use crate::optimizer::AdamWConfig;
use crate::policy::Policy;
use crate::replay::{Conditioning, TransitionBatch};
use crate::trainer::Trainer;
use crate::update::{Objective, UpdateMetrics, accumulate};
use burn::tensor::{Device, Tensor, TensorData};
use grpo::{LossWeight, LossWeights, NoiseLevel, PolicyLoss, RatioKind, Recipe, Schedule, SigmaGrid, StochasticSteps};
use safetensors::tensor::{Dtype, TensorView};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use wan::image::{ImageCondition, Known};
use wan::text::PromptEmbeds;
use wan::transformer::TransformerConfig;
use wan::weights::{WeightFiles, to_floats, write_views};

const METADATA_KEY: &str = "flash_grpo";
const HINT: &str = "`flash-grpo train --set debug.save_rollouts=true` writes such files; docs/method.md describes them";

/// Everything that is not a tensor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// Classifier-free guidance; 1 is off.
    pub guidance_scale: f64,
    /// That of the second network, if there is one; if absent, the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guidance_scale_2: Option<f64>,
    /// `linear`, `flow`, `constant`, `cps` (with their published parameter), or a table with `type` and parameter.
    pub noise_level: NamedNoiseLevel,
    /// `uniform`, `rectified` or `noise-level`.
    pub loss_weight: LossWeight,
    /// The first `step_pool` steps are those that may be stochastic; the weights average 1 over them.
    pub step_pool: usize,
    /// Clip range of the ratio.
    pub clip_range: f64,
    /// Advantages are clamped to this magnitude.
    pub advantage_clip: f64,
    /// AdamW.
    pub optimizer: AdamWConfig,
    /// How timesteps follow from the sigmas.
    #[serde(default)]
    pub grid: SigmaGrid,
    /// Form of the probability ratio; the normalised one needs the tensor `old_velocity`.
    #[serde(default)]
    pub ratio: RatioKind,
    /// Largest KL per element that a step may move, instead of the clip; needs the tensor `old_velocity`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kl_mask: Option<f64>,
    /// Weight of the KL to the weights at the start of the replay.
    #[serde(default)]
    pub kl_beta: f64,
}

/// A noise level by its name alone, or with its parameter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum NamedNoiseLevel {
    /// The published parameter.
    Name(String),
    /// Any parameter.
    Full(NoiseLevel),
}

/// A file of recorded transitions, ready to be replayed.
pub struct Recording {
    /// The file.
    pub path: PathBuf,
    /// The header.
    pub header: Header,
    /// Schedule, loss and weights.
    pub objective: Objective,
    /// The transitions in micro-batches.
    pub batches: Vec<TransitionBatch>,
}

/// Writes the transitions of an iteration's updates.
///
/// # Errors
/// The file cannot be written.
pub fn save(trainer: &Trainer, batches: &[TransitionBatch], path: &Path) -> Result<()> {
    // those with a graph are on its device, the others are not
    let on_host = |batch: &TransitionBatch| TransitionBatch { retained: None, ..batch.clone() }.to_device(&Device::flex());
    let batches: Vec<TransitionBatch> = batches.iter().map(on_host).collect();
    let recipe = &trainer.recipe;
    let header = Header {
        guidance_scale: trainer.settings.sampling.guidance_scale,
        guidance_scale_2: trainer.settings.sampling.guidance_scale_2,
        noise_level: NamedNoiseLevel::Full(recipe.noise_level),
        loss_weight: recipe.loss_weight,
        step_pool: recipe.stochastic.pool(trainer.objective.schedule.num_steps()).iter().max().map_or(0, |last| last + 1),
        clip_range: trainer.settings.train.clip_range,
        advantage_clip: trainer.settings.train.advantage_clip,
        optimizer: trainer.settings.optimizer,
        grid: trainer.objective.schedule.grid(),
        ratio: recipe.ratio,
        kl_mask: recipe.kl_mask,
        kl_beta: trainer.settings.train.kl_beta,
    };
    let text = serde_json::to_string(&header).map_err(|e| Error::recording(path, e, HINT))?;
    let stack = |of: &dyn Fn(&TransitionBatch) -> Tensor<5>| Tensor::cat(batches.iter().map(of).collect(), 0);
    let prompts = Tensor::cat(batches.iter().map(|b| b.conditioning.prompts.select(&b.conditioning.prompt_of).to_padded()).collect(), 0);
    let flat = |of: &dyn Fn(&TransitionBatch) -> Vec<f64>| batches.iter().flat_map(of).map(|v| v as f32).collect::<Vec<_>>();
    let count = batches.iter().map(TransitionBatch::len).sum::<usize>();
    let sigmas: Vec<f32> = trainer.objective.schedule.sigmas().iter().map(|&s| s as f32).collect();
    let mut tensors = vec![
        floats("latents", stack(&|b| b.latents.clone())),
        floats("next_latents", stack(&|b| b.next_latents.clone())),
        floats("prompt_embeds", prompts),
        ("old_log_prob", vec![count], Dtype::F32, bytes(&flat(&|b| b.old_log_probs.clone()))),
        ("advantages", vec![count], Dtype::F32, bytes(&flat(&|b| b.advantages.clone()))),
        ("sigmas", vec![sigmas.len()], Dtype::F32, bytes(&sigmas)),
    ];
    let steps: Vec<u8> = batches.iter().flat_map(|b| &b.steps).flat_map(|&step| (step as i64).to_le_bytes()).collect();
    tensors.push(("step", vec![count], Dtype::I64, steps));
    if trainer.objective.loss.needs_change() && batches.iter().all(|b| b.old_velocity.is_some()) {
        let old = batches.iter().filter_map(|b| b.old_velocity.clone()).collect();
        tensors.push(floats("old_velocity", Tensor::cat(old, 0)));
    }
    tensors.extend(images(&batches));
    if header.is_guided() {
        tensors.push(floats("negative_prompt_embeds", trainer.negative.to_padded()));
    }
    let views: std::result::Result<Vec<_>, _> =
        tensors.iter().map(|(name, shape, dtype, bytes)| TensorView::new(*dtype, shape.clone(), bytes).map(|view| (*name, view))).collect();
    let metadata = HashMap::from([(METADATA_KEY.to_owned(), text)]);
    let views = views.map_err(|e| Error::recording(path, e, HINT))?;
    Ok(write_views(path, views, Some(metadata))?)
}

/// What the samples' videos start with, if they start with images.
fn images(batches: &[TransitionBatch]) -> Vec<Entry> {
    let of_samples = |batch: &TransitionBatch| Some(batch.conditioning.image.as_ref()?.select(&batch.conditioning.prompt_of));
    let Some(images) = batches.iter().map(of_samples).collect::<Option<Vec<_>>>().filter(|images| !images.is_empty()) else {
        return Vec::new();
    };
    let ImageCondition { known, features } = ImageCondition::cat(images);
    let known = match known {
        Known::Channels(channels) => floats(IMAGE_CHANNELS, channels),
        Known::FirstFrame(first) => floats(FIRST_FRAME, first),
    };
    std::iter::once(known).chain(features.map(|features| floats(IMAGE_FEATURES, features))).collect()
}

const IMAGE_CHANNELS: &str = "image_channels";
const FIRST_FRAME: &str = "first_frame";
const IMAGE_FEATURES: &str = "image_features";

type Entry = (&'static str, Vec<usize>, Dtype, Vec<u8>);

fn floats<const D: usize>(name: &'static str, tensor: Tensor<D>) -> Entry {
    (name, tensor.dims().to_vec(), Dtype::F32, bytes(&to_floats(tensor)))
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

impl Recording {
    /// Reads a file; the transitions are cut into micro-batches of `micro_batch`.
    ///
    /// # Errors
    /// A tensor or header entry that is missing, or sizes that do not fit each other.
    pub fn load(path: &Path, micro_batch: usize, device: &Device) -> Result<Self> {
        let files = WeightFiles::open_file(path)?;
        let text = files.metadata().and_then(|m| m.get(METADATA_KEY));
        let text = text.ok_or_else(|| Error::recording(path, format!("the header has no metadata entry `{METADATA_KEY}`"), HINT))?;
        let header: Header =
            serde_json::from_str(text).map_err(|e| Error::recording(path, format!("metadata `{METADATA_KEY}`: {e}"), HINT))?;
        let objective = header.objective(files.floats("sigmas")?, path)?;
        let whole = read_batch(&files, &header, path, device)?;
        let steps = objective.schedule.num_steps();
        if let Some(step) = whole.steps.iter().find(|&&step| step >= steps) {
            return Err(Error::recording(path, format!("`step` holds {step}, but `sigmas` has {steps} steps"), HINT));
        }
        let count = whole.len();
        let batches = (0..count).step_by(micro_batch).map(|from| whole.range(from, (from + micro_batch).min(count))).collect();
        Ok(Self { path: path.into(), header, objective, batches })
    }

    /// Whether a network of these sizes can replay the transitions.
    ///
    /// # Errors
    /// Latents, prompts or images of other sizes.
    pub fn check_fits(&self, config: &TransformerConfig) -> Result<()> {
        let Some(batch) = self.batches.first() else { return Ok(()) };
        check_image(batch.conditioning.image.as_ref(), config)
            .map_err(|reason| Error::recording(&self.path, reason, "replay with the model that was recorded"))?;
        let ([_, channels, frames, height, width], [t, h, w]) = (batch.latents.dims(), config.patch_size);
        let text = batch.conditioning.prompts.embeds.dims()[2];
        if channels != config.out_channels || !frames.is_multiple_of(t) || !height.is_multiple_of(h) || !width.is_multiple_of(w) {
            let reason = format!(
                "`latents` has {channels} channels of {frames}x{height}x{width}, the model {} and patches of {t}x{h}x{w}",
                config.out_channels
            );
            return Err(Error::recording(&self.path, reason, "replay with the model that was recorded"));
        }
        if frames.max(height).max(width) > config.rope_max_seq_len {
            let reason = format!("`latents` of {frames}x{height}x{width} go beyond the model's {} positions", config.rope_max_seq_len);
            return Err(Error::recording(&self.path, reason, "replay with the model that was recorded"));
        }
        if text != config.text_dim {
            let reason = format!("`prompt_embeds` has {text} features, the model {}", config.text_dim);
            return Err(Error::recording(&self.path, reason, "replay with the model that was recorded"));
        }
        Ok(())
    }

    /// Evaluates the transitions under the policy's present weights, without changing them.
    pub fn evaluate(&self, policy: &Policy) -> UpdateMetrics {
        let (gradients, mut metrics) = accumulate(policy, &self.objective, &self.batches);
        metrics.grad_norm = gradients.norm();
        metrics
    }
}

/// Whether a network reads what the videos start with.
fn check_image(image: Option<&ImageCondition>, config: &TransformerConfig) -> std::result::Result<(), String> {
    let [channels, first] = match image.map(|image| &image.known) {
        Some(Known::Channels(channels)) => [channels.dims()[1], 0],
        Some(Known::FirstFrame(_)) => [0, 1],
        None => [0, 0],
    };
    let expected = config.in_channels - config.out_channels.min(config.in_channels);
    if channels != expected {
        return Err(format!("`{IMAGE_CHANNELS}` has {channels} channels, the model reads {expected} of an image"));
    }
    if first == 1 && config.patch_size[0] != 1 {
        return Err(format!("there is a `{FIRST_FRAME}`, and the model has patches of {} frames", config.patch_size[0]));
    }
    let features = image.and_then(|image| image.features.as_ref()).map(|features| features.dims()[2]);
    if features != config.image_dim {
        return Err(format!(
            "`{IMAGE_FEATURES}` has {} features, the model attends to {}",
            features.unwrap_or(0),
            config.image_dim.unwrap_or(0)
        ));
    }
    Ok(())
}

impl Header {
    /// Whether the negative prompt takes part.
    fn is_guided(&self) -> bool {
        self.guidance_scale != 1.0 || self.guidance_scale_2.is_some_and(|scale| scale != 1.0)
    }

    fn objective(&self, sigmas: Vec<f32>, path: &Path) -> Result<Objective> {
        let second = self.guidance_scale_2.unwrap_or(self.guidance_scale);
        let scales = [("guidance_scale", self.guidance_scale), ("guidance_scale_2", second), ("advantage_clip", self.advantage_clip)];
        for (name, value) in scales {
            if !(value.is_finite() && value >= 0.0) {
                return Err(Error::recording(path, format!("`{name}` is {value}, expected 0 or a positive number"), HINT));
            }
        }
        let noise_level = match &self.noise_level {
            NamedNoiseLevel::Full(level) => *level,
            NamedNoiseLevel::Name(name) => NoiseLevel::named(name)
                .ok_or_else(|| Error::recording(path, format!("`noise_level` is `{name}`"), "`linear`, `flow`, `constant` or `cps`"))?,
        };
        let schedule = Schedule::from_sigmas(self.grid, sigmas.into_iter().map(f64::from).collect())?;
        let stochastic = StochasticSteps::Random { count: 1, pool: self.step_pool };
        let recipe = Recipe { stochastic, noise_level, loss_weight: self.loss_weight, ..Recipe::flash_grpo() };
        Ok(Objective { weights: LossWeights::new(&recipe, &schedule)?, schedule, noise_level, loss: self.loss()? })
    }

    fn loss(&self) -> Result<PolicyLoss> {
        let loss = PolicyLoss { ratio: self.ratio, clip_range: self.clip_range, kl_mask: self.kl_mask, kl_beta: self.kl_beta };
        loss.validate()?;
        Ok(loss)
    }
}

fn read_batch(files: &WeightFiles, header: &Header, path: &Path, device: &Device) -> Result<TransitionBatch> {
    let latents: Tensor<5> = read(files, "latents", path, device)?;
    let (latents_shape, count) = (latents.dims(), latents.dims()[0]);
    let same = |name: &str| -> Result<Tensor<5>> {
        let tensor: Tensor<5> = read(files, name, path, device)?;
        let (found, expected) = (tensor.dims(), latents.dims());
        if found == expected {
            Ok(tensor)
        } else {
            Err(Error::recording(path, format!("`{name}` has shape {found:?}, `latents` {expected:?}"), HINT))
        }
    };
    if latents.dims().contains(&0) {
        return Err(Error::recording(path, format!("`latents` has shape {:?}", latents.dims()), HINT));
    }
    let list = |name: &str| -> Result<Vec<f64>> {
        let values: Vec<f64> = files.floats(name)?.into_iter().map(f64::from).collect();
        if values.len() == count {
            return Ok(values);
        }
        Err(Error::recording(path, format!("`{name}` has {} entries, `latents` has {count}", values.len()), HINT))
    };
    let embeds = |name: &str| -> Result<PromptEmbeds> {
        let padded: Tensor<3> = read(files, name, path, device)?;
        let [rows, length, features] = padded.dims();
        if (rows != count && !(rows == 1 && name.starts_with("negative"))) || length == 0 || features == 0 {
            return Err(Error::recording(path, format!("`{name}` has shape {:?} for {count} samples", padded.dims()), HINT));
        }
        Ok(PromptEmbeds::from_padded(padded))
    };
    let negative = if header.is_guided() { Some(embeds("negative_prompt_embeds")?) } else { None };
    let clip = header.advantage_clip;
    Ok(TransitionBatch {
        next_latents: same("next_latents")?,
        old_velocity: if header.loss()?.needs_change() { Some(same("old_velocity")?) } else { None },
        latents,
        retained: None,
        samples: (0..count).collect(),
        owners: (0..count).collect(),
        steps: list("step")?.into_iter().map(|step| step as usize).collect(),
        old_log_probs: list("old_log_prob")?,
        advantages: list("advantages")?.into_iter().map(|a| a.clamp(-clip, clip)).collect(),
        conditioning: Conditioning {
            image: read_image(files, latents_shape, path, device)?,
            prompts: embeds("prompt_embeds")?,
            negative,
            prompt_of: (0..count).collect(),
            guidance_scale: header.guidance_scale,
            guidance_scale_2: header.guidance_scale_2,
        },
    })
}

/// What the videos start with, for latents of the given shape.
fn read_image(files: &WeightFiles, [n, c, f, h, w]: [usize; 5], path: &Path, device: &Device) -> Result<Option<ImageCondition>> {
    let has = |name: &str| files.shape(name).is_some();
    let known = |name: &str, fits: &dyn Fn([usize; 5]) -> bool| -> Result<Tensor<5>> {
        let tensor: Tensor<5> = read(files, name, path, device)?;
        let shape = tensor.dims();
        if fits(shape) {
            return Ok(tensor);
        }
        Err(Error::recording(path, format!("`{name}` has shape {shape:?} for `latents` of {:?}", [n, c, f, h, w]), HINT))
    };
    let known = match (has(IMAGE_CHANNELS), has(FIRST_FRAME)) {
        (false, false) => return Ok(None),
        (true, true) => return Err(Error::recording(path, format!("there are both `{IMAGE_CHANNELS}` and `{FIRST_FRAME}`"), HINT)),
        (true, false) => Known::Channels(known(IMAGE_CHANNELS, &|[rows, channels, frames, height, width]| {
            channels > 0 && [rows, frames, height, width] == [n, f, h, w]
        })?),
        (false, true) => Known::FirstFrame(known(FIRST_FRAME, &|shape| shape == [n, c, 1, h, w])?),
    };
    let features = if has(IMAGE_FEATURES) { Some(read::<3>(files, IMAGE_FEATURES, path, device)?) } else { None };
    match features.as_ref().map(Tensor::dims).filter(|[rows, tokens, features]| *rows != n || tokens * features == 0) {
        Some(shape) => Err(Error::recording(path, format!("`{IMAGE_FEATURES}` has shape {shape:?} for {n} samples"), HINT)),
        None => Ok(Some(ImageCondition { known, features })),
    }
}

fn read<const D: usize>(files: &WeightFiles, name: &str, path: &Path, device: &Device) -> Result<Tensor<D>> {
    let values = files.floats(name)?;
    let shape = files.shape(name).unwrap_or_default();
    if shape.len() != D {
        return Err(Error::recording(path, format!("`{name}` has shape {shape:?}, expected {D} axes"), HINT));
    }
    Ok(Tensor::from_data(TensorData::new(values, shape), &device.clone().inner()))
}
