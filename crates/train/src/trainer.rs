//! Everything a run holds in memory.

use crate::collective::{Alone, Collective};
use crate::embedding_cache::EmbeddingCache;
use crate::error::{Error, Result};
use crate::first_frames::{FirstFrames, Readers};
use crate::inputs::{self, Inputs};
use crate::optimizer::{AdamW, Ema};
use crate::plan::Networks;
use crate::policy::{Policy, adapted_layers};
use crate::prompts::{self, PromptSet};
use crate::replay::Conditioning;
use crate::settings::Settings;
use crate::stop::Stop;
use crate::update::Objective;
use burn::tensor::{DType, Device, Tensor};
use grpo::{LossWeights, Recipe, Schedule};
use reward::{BuildOptions, Reward, Weighted};
use std::path::Path;
use video::Frames;
use wan::clip::ClipVision;
use wan::experts::SecondExpert;
use wan::image::ImageInput;
use wan::pipeline::WanPipeline;
use wan::text::{PromptEmbeds, PromptEncoder, StagedTextEncoder};
use wan::vae::AutoencoderKlWan;
use wan::weights::to_floats;

/// A run: settings, networks, prompts, rewards, optimizer.
pub struct Trainer {
    /// The resolved recipe.
    pub settings: Settings,
    /// The method.
    pub recipe: Recipe,
    /// What turns log-probabilities into gradients; holds the rollouts' schedule.
    pub objective: Objective,
    /// The grid of the evaluation.
    pub eval_schedule: Schedule,
    /// What is trained.
    pub policy: Policy,
    /// Latents to frames.
    pub vae: AutoencoderKlWan,
    /// Images to what the network attends to, in Wan2.1 image-to-video.
    pub image_encoder: Option<ClipVision>,
    /// How images reach the network.
    pub image_input: ImageInput,
    /// Prompts of the rollouts.
    pub train_prompts: PromptSet,
    /// Held-out prompts.
    pub eval_prompts: PromptSet,
    /// Checksums of what was read.
    pub inputs: Inputs,
    /// The negative prompt [1, L, D].
    pub negative: PromptEmbeds,
    /// What videos are worth.
    pub reward: Weighted,
    /// What the evaluation counts instead, if anything; never trained on.
    pub eval_reward: Option<Weighted>,
    /// AdamW.
    pub optimizer: AdamW,
    /// Averaged weights, if used.
    pub ema: Option<Ema>,
    /// Other processes.
    pub collective: Box<dyn Collective>,
    /// Whether somebody asked the run to end.
    pub stop: Stop,
    /// Where tensors live.
    pub device: Device,
}

/// What an update changes.
#[derive(Debug, Clone)]
pub struct TrainerState {
    weights: Vec<Tensor<1>>,
    optimizer: AdamW,
    ema: Option<Ema>,
}

impl Trainer {
    /// Loads the model, encodes all prompts, drops the text encoder, and puts the policy in place.
    ///
    /// # Errors
    /// Files that are missing or do not fit; a recipe that the model cannot serve.
    pub fn new(settings: Settings, device: &Device) -> Result<Self> {
        Self::with_stop(settings, Stop::default(), device)
    }

    /// The same, which gives up waiting for rewards when it is asked to stop.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_stop(settings: Settings, stop: Stop, device: &Device) -> Result<Self> {
        settings.check_files()?;
        let cache = Some(settings.scoring.cache.clone()).filter(|folder| !folder.as_os_str().is_empty());
        let options = BuildOptions { cache, stop: reward::Stop::new(stop.flag()) };
        let reward = reward::build(&settings.reward, &options)?;
        let eval_reward = if settings.eval_reward.is_empty() { None } else { Some(reward::build(&settings.eval_reward, &options)?) };
        let train = prompts::load(&settings.prompts.train, "prompts.train")?;
        let mut eval = prompts::load(&settings.prompts.eval, "prompts.eval")?;
        eval.truncate(settings.eval.num_prompts);
        let folder = settings.model_folder()?;
        WanPipeline::check(&folder)?;
        if let Some(networks) = Networks::of(&settings)? {
            settings.check_size(&networks.transformer, &networks.vae)?;
            adapted_layers(&settings, &networks.transformer)?;
        }
        let image_input = ImageInput::of_folder(&folder)?;
        let train_images = FirstFrames::of(&train, "prompts.train", image_input)?;
        let eval_images = FirstFrames::of(&eval, "prompts.eval", image_input)?;
        settings.check_images([train_images.is_some(), eval_images.is_some()])?;
        let inputs = inputs::of(&folder, [&train, &eval])?;
        let [(train_texts, train_metadata), (eval_texts, eval_metadata)] =
            [train, eval].map(|prompts| prompts.into_iter().map(|prompt| (prompt.text, prompt.metadata)).unzip::<_, _, Vec<_>, Vec<_>>());
        train_texts.iter().try_for_each(|text| reward.check_prompt(text))?;
        eval_texts.iter().try_for_each(|text| eval_reward.as_ref().unwrap_or(&reward).check_prompt(text))?;
        [Some(&reward), eval_reward.as_ref()].into_iter().flatten().try_for_each(Reward::prepare)?;
        let [train_prompts, eval_prompts, negative] = encode(&settings, &folder, [train_texts, eval_texts], device)?;
        let train_prompts = train_prompts.with_images(train_images).with_metadata(train_metadata);
        let eval_prompts = eval_prompts.with_images(eval_images).with_metadata(eval_metadata);
        let dtype = settings.train.mixed_precision.dtype();
        let (transformer, mut vae) = WanPipeline::load_without_text(&folder, device, dtype)?;
        vae.tiling = settings.sampling.tiling();
        let image_encoder = WanPipeline::load_image_encoder(&folder, &transformer.config, device)?;
        let second = SecondExpert::load(&folder, device, dtype)?;
        let mut policy = Policy::of_experts(transformer, second, &settings.policy, settings.seed, device)?;
        policy.activation_checkpointing = settings.train.activation_checkpointing;
        let optimizer = AdamW::new(settings.optimizer, policy.params());
        let ema = (settings.train.ema_decay > 0.0).then(|| Ema::new(settings.train.ema_decay, policy.params()));
        Ok(Self {
            recipe: settings.recipe(),
            objective: objective(&settings)?,
            eval_schedule: settings.eval_schedule()?,
            policy,
            vae,
            image_encoder,
            image_input,
            train_prompts,
            eval_prompts,
            inputs,
            negative: negative.embeds(&[0], device),
            reward,
            eval_reward,
            optimizer,
            ema,
            collective: Box::new(Alone),
            stop,
            device: device.clone(),
            settings,
        })
    }

    /// Shape of one sample's latents [C, f, h, w], what is known of them included.
    pub fn latent_shape(&self) -> [usize; 4] {
        let sampling = &self.settings.sampling;
        let config = &self.vae.config;
        let (spatial, temporal) = (config.spatial_factor(), config.temporal_factor());
        [config.z_dim, (sampling.num_frames - 1) / temporal + 1, sampling.height / spatial, sampling.width / spatial]
    }

    /// Conditioning of samples with the given prompt ids of `set`.
    ///
    /// # Errors
    /// A picture that cannot be read any more.
    pub fn conditioning(&self, set: &PromptSet, prompt_ids: &[usize]) -> Result<Conditioning> {
        let mut distinct: Vec<usize> = prompt_ids.to_vec();
        distinct.dedup();
        let place = |id: &usize| distinct.iter().position(|d| d == id).unwrap_or_default();
        let (input, vae, encoder) = (self.image_input, &self.vae, self.image_encoder.as_ref());
        let readers = Readers { input, vae, encoder, size: &self.settings.sampling, device: &self.device };
        let image = set.images.as_ref().map(|images| images.condition(&distinct, &readers));
        Ok(Conditioning {
            prompts: set.embeds(&distinct, &self.device),
            negative: Some(self.negative.clone()),
            prompt_of: prompt_ids.iter().map(place).collect(),
            guidance_scale: self.settings.sampling.guidance_scale,
            guidance_scale_2: self.settings.sampling.guidance_scale_2,
            image: image.transpose()?,
        })
    }

    /// Latents [B, C, f, h, w] to clips.
    pub fn decode(&self, latents: Tensor<5>) -> Result<Vec<Frames>> {
        let frames = self.vae.decode_to_frames(latents);
        clips(frames)
    }

    /// Latents [B, C, f, h, w] of rollouts to what their rewards look at: clips that may end after the last frame that any of them needs.
    ///
    /// # Errors
    /// As [`decode`](Self::decode).
    pub fn decode_for_reward(&self, latents: Tensor<5>) -> Result<Vec<Frames>> {
        let sampling = &self.settings.sampling;
        let frames = reward::leading_frames(&self.settings.reward, sampling.num_frames, sampling.fps);
        self.decode(self.vae.leading(latents, frames))
    }

    /// What the evaluation counts: its own rewards, or those of training where it has none.
    pub fn evaluation_reward(&self) -> &Weighted {
        self.eval_reward.as_ref().unwrap_or(&self.reward)
    }

    /// How many of so many samples or updates may be left out.
    pub fn tolerated(&self, all: usize) -> usize {
        (self.settings.train.max_skipped * all as f64).floor() as usize
    }

    /// # Errors
    /// [`Error::NotFinite`] if more than that were left out.
    pub fn tolerate(&self, what: &'static str, skipped: usize, all: usize, place: impl Fn() -> String) -> Result<()> {
        if skipped <= self.tolerated(all) {
            return Ok(());
        }
        Err(Error::NotFinite { what, skipped, all, allowed: self.settings.train.max_skipped, place: place() })
    }

    /// Everything that an update changes; cheap handles.
    pub fn state(&self) -> TrainerState {
        TrainerState { weights: self.policy.params().snapshot(), optimizer: self.optimizer.clone(), ema: self.ema.clone() }
    }

    /// Goes back to an earlier state.
    pub fn restore(&mut self, state: TrainerState) {
        self.policy.params().restore(&state.weights);
        self.optimizer = state.optimizer;
        self.ema = state.ema;
    }

    /// The averaged weights, or the present ones where no average is kept, or none was taken yet.
    pub fn exported_weights(&self) -> Vec<Tensor<1>> {
        let averaged = self.ema.as_ref().filter(|ema| ema.updates > 0);
        averaged.map_or_else(|| self.policy.params().snapshot(), |ema| ema.values.clone())
    }
}

/// Frames [B, 3, F, H, W] in [0, 1] as clips.
///
/// # Errors
/// None for tensors of that shape.
pub fn clips(frames: Tensor<5>) -> Result<Vec<Frames>> {
    let [_, channels, f, h, w] = frames.dims();
    let values = to_floats(frames.permute([0, 2, 3, 4, 1]));
    let clip = |values: &[f32]| Frames::new(f, h, w, values.to_vec());
    Ok(values.chunks(channels * f * h * w).map(clip).collect::<std::result::Result<_, _>>()?)
}

/// All prompts of a run: of training, of evaluation, and the negative one. The text encoder is gone before anything else is loaded.
///
/// # Errors
/// A text that the tokenizer refuses; a text encoder that cannot be read; a cache that cannot be written.
fn encode(settings: &Settings, path: &Path, [train, eval]: [Vec<String>; 2], device: &Device) -> Result<[PromptSet; 3]> {
    let length = settings.sampling.max_sequence_length;
    let lists = [train, eval, vec![settings.prompts.negative.clone()]];
    let encoder = match &settings.model.embedding_cache {
        Some(_) => PromptEncoder::Staged(StagedTextEncoder::open(path, device)?),
        None => PromptEncoder::open(path, device, DType::F32)?,
    };
    let PromptEncoder::Staged(staged) = &encoder else {
        let [train, eval, negative] = lists.map(|texts| PromptSet::encode(texts, &encoder, length));
        return Ok([train?, eval?, negative?]);
    };
    let cache = settings.model.embedding_cache.as_ref().map(|dir| EmbeddingCache::open(dir, staged)).transpose()?;
    let sets = PromptSet::encode_staged(lists.into(), staged, cache.as_ref(), length)?;
    Ok(sets.try_into().expect("one set per list"))
}

/// The objective of a recipe.
///
/// # Errors
/// Values that do not fit together.
pub fn objective(settings: &Settings) -> Result<Objective> {
    let (recipe, schedule) = (settings.recipe(), settings.schedule()?);
    Ok(Objective { weights: LossWeights::new(&recipe, &schedule)?, noise_level: recipe.noise_level, loss: settings.loss()?, schedule })
}
