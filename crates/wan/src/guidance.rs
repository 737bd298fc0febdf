//! Classifier-free guidance (Ho & Salimans 2022): two predictions, with the prompt and with the negative prompt.
//!
//! ```text
//! v = v_uncond + s (v_cond - v_uncond)
//! ```
//!
//! Rollout, replay, evaluation and the pipeline all ask [`GuidedVelocity`] for the velocity. As everywhere in this crate,
//! **gradients are recorded if and only if the latents are an autodiff tensor**, through both branches.
//!
//! Legend: `P` distinct prompts, `B` samples, `C` latent channels, `F`, `H`, `W` size of the latents, `L` tokens.

use crate::text::PromptEmbeds;
use crate::transformer::recompute::{Receive, Trace};
use crate::transformer::{TextContext, WanTransformer};
use burn::tensor::{Gradients, Tensor};

/// Whether both branches go through the transformer as one batch of 2B or as two of B.
///
/// The results agree up to rounding. One batch pays when a call is small; two calls need half the memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GuidanceBatching {
    /// One batch of 2B.
    Together,
    /// The conditional batch, then the unconditional one.
    InTurn,
}

/// Tokens of one branch (B x L) beyond which a single batch loses more to memory traffic than it saves in calls (measured on
/// two cores: 10 % faster at 100 tokens, equal at 600, 20 % slower at 2,500).
const MAX_TOKENS_TOGETHER: usize = 512;

impl GuidanceBatching {
    /// The choice that suits a branch of `tokens` = B x L tokens.
    pub fn for_tokens(tokens: usize) -> Self {
        if tokens <= MAX_TOKENS_TOGETHER { Self::Together } else { Self::InTurn }
    }
}

/// What cross-attention needs of the prompts and the negative prompts. It does not depend on the timestep, nor on
/// how many samples share a prompt: a rollout computes it once.
#[derive(Debug, Clone)]
pub struct GuidedText {
    /// Rows: the P prompts, then the negative prompts.
    context: TextContext,
    num_prompts: usize,
    num_negatives: usize,
}

impl GuidedText {
    /// The context of P prompts, and of one negative prompt for all of them, or one each; none if there is no guidance.
    ///
    /// `record` says whether gradients are to flow (an adapter may sit on the text projections).
    ///
    /// # Panics
    /// If the number of negative prompts is neither 1 nor P, or the padding of the two differs.
    pub fn new(transformer: &WanTransformer, prompts: &PromptEmbeds, negatives: Option<&PromptEmbeds>, record: bool) -> Self {
        let num_prompts = prompts.batch_size();
        let Some(negatives) = negatives else {
            return Self { context: transformer.text_context(prompts, record), num_prompts, num_negatives: 0 };
        };
        let num_negatives = negatives.batch_size();
        assert!([1, num_prompts].contains(&num_negatives), "{num_negatives} negative prompts for {num_prompts} prompts");
        let both = PromptEmbeds::cat(prompts, negatives);
        Self { context: transformer.text_context(&both, record), num_prompts, num_negatives }
    }

    /// Rows of the context for samples of the given prompts: of their prompts, and of their negative prompts.
    fn rows(&self, samples: &[usize]) -> (Vec<usize>, Vec<usize>) {
        let negative = |&prompt: &usize| self.num_prompts + if self.num_negatives == 1 { 0 } else { prompt };
        (samples.to_vec(), samples.iter().map(negative).collect())
    }
}

/// The guided velocity of a batch of samples.
#[derive(Debug)]
pub struct GuidedVelocity<'a> {
    transformer: &'a WanTransformer,
    branches: Branches,
    guidance_scale: f64,
    samples: usize,
}

#[derive(Debug)]
enum Branches {
    Conditional(TextContext),
    /// 2B rows
    Together(TextContext),
    /// B rows each
    InTurn(Box<[TextContext; 2]>),
}

impl<'a> GuidedVelocity<'a> {
    /// For B samples, where sample `b` has prompt `samples[b]` of `text`. `guidance_scale` 1 is no guidance: the
    /// unconditional branch is not computed.
    ///
    /// # Panics
    /// If `samples` is empty or names a prompt that `text` lacks, or there is guidance but no negative prompt.
    pub fn new(
        transformer: &'a WanTransformer,
        text: &GuidedText,
        samples: &[usize],
        guidance_scale: f64,
        batching: GuidanceBatching,
    ) -> Self {
        assert!(samples.iter().all(|&prompt| prompt < text.num_prompts), "{samples:?} of {} prompts", text.num_prompts);
        let (prompts, negatives) = text.rows(samples);
        let branches = if guidance_scale == 1.0 {
            Branches::Conditional(text.context.select(&prompts))
        } else {
            assert!(text.num_negatives > 0, "guidance {guidance_scale} needs a negative prompt");
            match batching {
                GuidanceBatching::Together => Branches::Together(text.context.select(&[prompts, negatives].concat())),
                GuidanceBatching::InTurn => Branches::InTurn(Box::new([text.context.select(&prompts), text.context.select(&negatives)])),
            }
        };
        Self { transformer, branches, guidance_scale, samples: samples.len() }
    }

    /// The velocity [B, C, F, H, W] at `latents` of the same shape, f32.
    ///
    /// `timesteps` on the 0..1000 scale: one for all samples, one per sample (B), or one per token (B x L).
    ///
    /// # Panics
    /// If the batch is not that of [`new`](Self::new).
    pub fn velocity(&self, latents: Tensor<5>, timesteps: &[f64]) -> Tensor<5> {
        self.combined(self.predictions(latents, timesteps))
    }

    /// The velocity as the start of a graph that [`GuidedTrace::backward`] continues: the activations in between are not kept but
    /// computed again. `latents` and the text are plain tensors; other arguments as for [`velocity`](Self::velocity).
    ///
    /// # Panics
    /// As [`velocity`](Self::velocity).
    pub fn velocity_traced(&self, latents: Tensor<5>, timesteps: &[f64]) -> (Tensor<5>, GuidedTrace) {
        let mut passes = Vec::new();
        let predictions = self.predictions_by(latents, timesteps, &mut |latents, timesteps, text| {
            let (velocity, trace) = self.transformer.forward_traced(latents, timesteps, text);
            let velocity = velocity.autodiff().require_grad();
            passes.push((trace, velocity.clone()));
            velocity
        });
        (self.combined(predictions), GuidedTrace { passes })
    }

    fn combined(&self, predictions: (Tensor<5>, Option<Tensor<5>>)) -> Tensor<5> {
        match predictions {
            (conditional, None) => conditional,
            (conditional, Some(unconditional)) => guided(conditional, unconditional, self.guidance_scale),
        }
    }

    /// The two predictions v_cond and v_uncond; no second one without guidance. Arguments as for [`velocity`](Self::velocity).
    pub fn predictions(&self, latents: Tensor<5>, timesteps: &[f64]) -> (Tensor<5>, Option<Tensor<5>>) {
        self.predictions_by(latents, timesteps, &mut |latents, timesteps, text| self.transformer.forward(latents, timesteps, text))
    }

    /// As [`predictions`](Self::predictions), with the transformer's part done by `forward`.
    fn predictions_by(
        &self,
        latents: Tensor<5>,
        timesteps: &[f64],
        forward: &mut dyn FnMut(Tensor<5>, &[f64], &TextContext) -> Tensor<5>,
    ) -> (Tensor<5>, Option<Tensor<5>>) {
        let batch = self.samples;
        assert_eq!(latents.dims()[0], batch, "latents of another batch size");
        let timesteps = if timesteps.len() == 1 { vec![timesteps[0]; batch] } else { timesteps.to_vec() };
        match &self.branches {
            Branches::Conditional(text) => (forward(latents, &timesteps, text), None),
            Branches::InTurn(texts) => {
                let [text, negative] = texts.as_ref();
                let conditional = forward(latents.clone(), &timesteps, text);
                (conditional, Some(forward(latents, &timesteps, negative)))
            }
            Branches::Together(text) => {
                let both = Tensor::cat(vec![latents.clone(), latents], 0);
                let velocities = forward(both, &[timesteps.clone(), timesteps].concat(), text);
                let half = |from| velocities.clone().narrow(0, from, batch);
                (half(0), Some(half(batch)))
            }
        }
    }
}

/// The way back from a velocity of [`GuidedVelocity::velocity_traced`].
#[derive(Debug)]
pub struct GuidedTrace {
    /// Each pass with the prediction that came of it.
    passes: Vec<(Trace, Tensor<5>)>,
}

impl GuidedTrace {
    /// Goes on where `gradients` ended, those of a function of the velocity: backward through the passes of `transformer`.
    ///
    /// # Panics
    /// If the transformer is another one.
    pub fn backward(self, transformer: &WanTransformer, gradients: &Gradients, receive: Receive<'_>) {
        let with_gradient = |(trace, velocity): (Trace, Tensor<5>)| Some((trace, velocity.grad(gradients)?));
        let passes: Vec<_> = self.passes.into_iter().filter_map(with_gradient).collect();
        if !passes.is_empty() {
            transformer.backward_traced(passes, receive);
        }
    }
}

/// v_uncond + s (v_cond - v_uncond)
fn guided(conditional: Tensor<5>, unconditional: Tensor<5>, guidance_scale: f64) -> Tensor<5> {
    unconditional.clone() + (conditional - unconditional).mul_scalar(guidance_scale)
}
