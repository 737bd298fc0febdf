//! One stochastic transition under the current policy. Rollout and replay both come through here.
//!
//! Legend: `B` samples, `C`, `F`, `H`, `W` latents, `D` = C F H W.

use burn::tensor::{Device, Tensor, TensorData};
use grpo::{Schedule, Transition};
use wan::guidance::{GuidanceBatching, GuidanceScales, GuidedText, GuidedTrace, GuidedVelocity};
use wan::image::ImageCondition;
use wan::text::PromptEmbeds;
use wan::weights::to_floats;

use crate::optimizer::GradientSum;
use crate::policy::Policy;
use crate::sharing::first_of_each;

/// The prompts of a batch of samples, and how strongly they guide.
#[derive(Debug, Clone)]
pub struct Conditioning {
    /// The distinct prompts [P, L, D].
    pub prompts: PromptEmbeds,
    /// The negative prompt [1, L, D], or one per prompt; not used at scale 1.
    pub negative: Option<PromptEmbeds>,
    /// Which prompt each of the B samples has.
    pub prompt_of: Vec<usize>,
    /// Classifier-free guidance; 1 is off.
    pub guidance_scale: f64,
    /// That of the second network, if there is one; if absent, the same.
    pub guidance_scale_2: Option<f64>,
    /// What the videos of the P prompts start with, for models of image-to-video.
    pub image: Option<ImageCondition>,
}

impl Conditioning {
    fn guidance(&self) -> GuidanceScales {
        GuidanceScales::new(self.guidance_scale, self.guidance_scale_2)
    }

    /// The guided velocity at latents of the given shape [B, C, F, H, W] under the policy's present weights, with the text's keys and values
    /// computed once.
    pub fn velocity<'a>(&self, policy: &'a Policy, latents: [usize; 5], record: bool) -> GuidedVelocity<'a> {
        let all: Vec<usize> = (0..self.prompt_of.len()).collect();
        self.velocity_of(policy, &self.text(policy, record), &all, latents)
    }

    /// v of all samples at `latents` [B, C, F, H, W] and their timesteps, computed once for those of one owner.
    pub fn distinct_velocity(&self, policy: &Policy, latents: &Tensor<5>, owners: &[usize], timesteps: &[f64], record: bool) -> Tensor<5> {
        let (rows, places) = first_of_each(owners);
        let timesteps: Vec<f64> = rows.iter().map(|&row| timesteps[row]).collect();
        let latents = pick(latents, &rows);
        let latents = if record { latents.autodiff() } else { latents };
        let velocity_of = self.velocity_of(policy, &self.text(policy, record), &rows, latents.dims());
        pick(&velocity_of.velocity(latents, &timesteps), &places)
    }

    /// What is to be denoised of latents [B, C, F, H, W] of the samples' whole videos.
    pub fn unknown(&self, latents: Tensor<5>) -> Tensor<5> {
        self.image.iter().fold(latents, |latents, image| image.select(&self.prompt_of).unknown(latents))
    }

    /// Latents of the samples' whole videos, of their denoised part.
    pub fn whole(&self, latents: Tensor<5>) -> Tensor<5> {
        self.image.iter().fold(latents, |latents, image| image.select(&self.prompt_of).whole(latents))
    }

    /// The text's keys and values.
    pub fn text(&self, policy: &Policy, record: bool) -> GuidedText {
        let negative = self.negative.as_ref().filter(|_| self.guidance() != 1.0.into());
        let features = self.image.as_ref().and_then(|image| image.features.clone());
        GuidedText::with_image(policy.experts(), &self.prompts, negative, features, record)
    }

    /// The guided velocity of some of the samples, computed as that of all of them is. A sample's latents have the shape `latents`
    /// [_, C, F, H, W].
    pub fn velocity_of<'a>(&self, policy: &'a Policy, text: &GuidedText, samples: &[usize], latents: [usize; 5]) -> GuidedVelocity<'a> {
        let batching = GuidanceBatching::for_tokens(self.prompt_of.len() * policy.transformer.num_tokens(latents));
        let prompts: Vec<usize> = samples.iter().map(|&sample| self.prompt_of[sample]).collect();
        let image = self.image.as_ref().map(|image| image.select(&prompts));
        GuidedVelocity::new(policy.experts(), text, &prompts, self.guidance(), batching).with_image(image)
    }

    /// The same on another device.
    pub fn to_device(&self, device: &Device) -> Self {
        Self {
            prompts: self.prompts.to_device(device),
            negative: self.negative.as_ref().map(|negative| negative.to_device(device)),
            image: self.image.as_ref().map(|image| image.to_device(device)),
            ..self.clone()
        }
    }

    /// The conditioning of some of the samples, without the prompts of the others: what is not finite in those cannot reach a gradient.
    pub fn select(&self, samples: &[usize]) -> Self {
        let prompts: Vec<usize> = samples.iter().map(|&i| self.prompt_of[i]).collect();
        let (firsts, prompt_of) = first_of_each(&prompts);
        let used: Vec<usize> = firsts.into_iter().map(|first| prompts[first]).collect();
        let negative = self.negative.as_ref().map(|n| if n.batch_size() == 1 { n.clone() } else { n.select_uncut(&used) });
        let image = self.image.as_ref().map(|image| image.select(&used));
        Self { prompts: self.prompts.select_uncut(&used), negative, prompt_of, image, ..self.clone() }
    }
}

/// The recorded transitions of a batch of samples, one each.
#[derive(Debug, Clone)]
pub struct TransitionBatch {
    /// x at the step [B, C, F, H, W].
    pub latents: Tensor<5>,
    /// x' that was drawn.
    pub next_latents: Tensor<5>,
    /// v during the rollout, if known.
    pub old_velocity: Option<Tensor<5>>,
    /// v with the graph of its computation, if the rollout kept it: good for one backward pass before the weights change.
    pub retained: Option<Tensor<5>>,
    /// Which sample of the rollout batch each entry is; of the iteration, once it is part of an update.
    pub samples: Vec<usize>,
    /// Entries of one owner have the same latents, step and prompt: their velocity is computed once.
    pub owners: Vec<usize>,
    /// The step of each sample.
    pub steps: Vec<usize>,
    /// log_prob of x' during the rollout.
    pub old_log_probs: Vec<f64>,
    /// Advantage of each sample.
    pub advantages: Vec<f64>,
    /// Prompts and guidance.
    pub conditioning: Conditioning,
}

/// A transition evaluated under the present weights; recorded if asked for.
#[derive(Debug)]
pub struct Replayed {
    /// v [B, C, F, H, W].
    pub velocity: Tensor<5>,
    /// mean over D of (x' - a x - b v)^2 `[B]`.
    pub mean_square_residual: Tensor<1>,
    /// log_prob of x' (mean over D).
    pub log_probs: Vec<f64>,
    /// How the graph goes on below the velocity, where activations were not kept.
    trace: Option<GuidedTrace>,
}

impl Replayed {
    /// Backpropagates a function of this replay and adds the gradients of the policy's weights.
    pub fn backward(self, surrogate: &Tensor<1>, policy: &Policy, gradients: &mut GradientSum) {
        let own = surrogate.backward();
        let Some(trace) = self.trace else { return gradients.add(policy.params(), &own) };
        // summed apart first, as within one graph
        let mut sum = GradientSum::new(policy.params());
        trace.backward(policy.experts(), &own, &mut |part| sum.add(policy.params(), part));
        gradients.merge(sum);
    }
}

impl TransitionBatch {
    /// Number of samples.
    pub fn len(&self) -> usize {
        self.steps.len()
    }

    /// Whether there is no sample.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// The same transitions with the advantages of the rollout batch's samples.
    pub fn with_advantages(&self, of_samples: &[f64]) -> Self {
        Self { advantages: self.samples.iter().map(|&sample| of_samples[sample]).collect(), ..self.clone() }
    }

    /// Some of the entries, with nothing of the others.
    pub fn select(&self, entries: &[usize]) -> Self {
        let parts: Vec<Self> = entries.iter().map(|&i| self.range(i, i + 1)).collect();
        let stack = |of: &dyn Fn(&Self) -> Tensor<5>| Tensor::cat(parts.iter().map(of).collect(), 0);
        let old: Vec<Tensor<5>> = parts.iter().filter_map(|part| part.old_velocity.clone()).collect();
        Self {
            latents: stack(&|part| part.latents.clone()),
            next_latents: stack(&|part| part.next_latents.clone()),
            old_velocity: if old.is_empty() { None } else { Some(Tensor::cat(old, 0)) },
            retained: None,
            samples: entries.iter().map(|&i| self.samples[i]).collect(),
            owners: entries.iter().map(|&i| self.owners[i]).collect(),
            steps: entries.iter().map(|&i| self.steps[i]).collect(),
            old_log_probs: entries.iter().map(|&i| self.old_log_probs[i]).collect(),
            advantages: entries.iter().map(|&i| self.advantages[i]).collect(),
            conditioning: self.conditioning.select(entries),
        }
    }

    /// Entries `from..to` alone.
    pub fn range(&self, from: usize, to: usize) -> Self {
        let narrow = |x: &Tensor<5>| x.clone().narrow(0, from, to - from);
        let entries: Vec<usize> = (from..to).collect();
        Self {
            latents: narrow(&self.latents),
            next_latents: narrow(&self.next_latents),
            old_velocity: self.old_velocity.as_ref().map(narrow),
            retained: None,
            samples: self.samples[from..to].to_vec(),
            owners: self.owners[from..to].to_vec(),
            steps: self.steps[from..to].to_vec(),
            old_log_probs: self.old_log_probs[from..to].to_vec(),
            advantages: self.advantages[from..to].to_vec(),
            conditioning: self.conditioning.select(&entries),
        }
    }

    /// The same transitions on another device. What has a graph stays where its graph is.
    pub fn to_device(&self, device: &Device) -> Self {
        if self.retained.is_some() {
            return self.clone();
        }
        Self { conditioning: self.conditioning.to_device(device), ..self.latents_to_device(device) }
    }

    /// The same, with all but the conditioning on another device.
    pub fn latents_to_device(&self, device: &Device) -> Self {
        let moved = |x: &Tensor<5>| x.clone().to_device(device);
        Self {
            latents: moved(&self.latents),
            next_latents: moved(&self.next_latents),
            old_velocity: self.old_velocity.as_ref().map(moved),
            ..self.clone()
        }
    }

    /// Evaluates the transitions under the policy's present weights.
    pub fn replay(&self, policy: &Policy, schedule: &Schedule, transitions: &[Transition], record: bool) -> Replayed {
        let timesteps: Vec<f64> = self.steps.iter().map(|&step| schedule.timestep(step)).collect();
        if record && policy.activation_checkpointing {
            let (rows, places) = first_of_each(&self.owners);
            let timesteps: Vec<f64> = rows.iter().map(|&row| timesteps[row]).collect();
            let velocity_of = self.conditioning.velocity_of(policy, &self.conditioning.text(policy, false), &rows, self.latents.dims());
            let (velocity, trace) = velocity_of.velocity_traced(pick(&self.latents, &rows), &timesteps);
            return Replayed { trace: Some(trace), ..evaluate(&self.latents, pick(&velocity, &places), &self.next_latents, transitions) };
        }
        let velocity = self.conditioning.distinct_velocity(policy, &self.latents, &self.owners, &timesteps, record);
        evaluate(&self.latents, velocity, &self.next_latents, transitions)
    }
}

/// The affine Gaussian of each sample applied to (x, v): `a x + b v`.
pub fn transition_mean(latents: &Tensor<5>, velocity: &Tensor<5>, transitions: &[Transition]) -> Tensor<5> {
    let a = column(latents, transitions.iter().map(|t| t.latents_coef));
    let b = column(latents, transitions.iter().map(|t| t.velocity_coef));
    latents.clone() * a + velocity.clone() * b
}

/// `log_prob = -ms / (2 std^2) - ln std - 1/2 ln 2 pi`, `ms = mean (x' - a x - b v)^2` over the D elements of a sample.
pub fn evaluate(latents: &Tensor<5>, velocity: Tensor<5>, next_latents: &Tensor<5>, transitions: &[Transition]) -> Replayed {
    let residual = next_latents.clone() - transition_mean(latents, &velocity, transitions);
    let mean_square_residual = mean_square(residual);
    let squares = to_floats(mean_square_residual.clone());
    let log_probs = squares.iter().zip(transitions).map(|(&ms, t)| t.log_prob(f64::from(ms))).collect();
    Replayed { velocity, mean_square_residual, log_probs, trace: None }
}

/// Rows `indices` of `x`.
pub fn pick(x: &Tensor<5>, indices: &[usize]) -> Tensor<5> {
    if indices.iter().copied().eq(0..x.dims()[0]) {
        return x.clone();
    }
    Tensor::cat(indices.iter().map(|&i| x.clone().narrow(0, i, 1)).collect(), 0)
}

/// [B, C, F, H, W] -> mean of the squares per sample `[B]`.
pub fn mean_square(x: Tensor<5>) -> Tensor<1> {
    let [batch, c, f, h, w] = x.dims();
    // a GPU gives a row to one thread, which would be long at two million numbers, and lose digits
    let parts = if wan::device::is_cpu(&x.device()) { 1 } else { c * f };
    (x.clone() * x).reshape([batch, parts, c * f * h * w / parts.max(1)]).mean_dim(2).mean_dim(1).reshape([batch])
}

/// One scalar per sample, [B, 1, 1, 1, 1].
pub fn column(like: &Tensor<5>, values: impl Iterator<Item = f64>) -> Tensor<5> {
    let values: Vec<f32> = values.map(|v| v as f32).collect();
    let shape = [values.len(), 1, 1, 1, 1];
    Tensor::from_data(TensorData::new(values, shape), &like.device().inner())
}
