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

use crate::experts::{Boundary, Experts};
use crate::image::ImageCondition;
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

/// Scales of guidance: of a model's only network, or of each of its two. One number is that of both.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GuidanceScales([f64; 2]);

impl GuidanceScales {
    /// `first` for the first network, `second` for the other; where there is none, the same for both.
    pub fn new(first: f64, second: Option<f64>) -> Self {
        Self([first, second.unwrap_or(first)])
    }
}

impl From<f64> for GuidanceScales {
    fn from(scale: f64) -> Self {
        Self([scale; 2])
    }
}

/// What cross-attention needs of the prompts and the negative prompts. It does not depend on the timestep, nor on
/// how many samples share a prompt: a rollout computes it once.
#[derive(Debug, Clone)]
pub struct GuidedText {
    /// For each network. Rows: the P prompts, then the negative prompts.
    contexts: Vec<TextContext>,
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
    pub fn new<'a>(experts: impl Into<Experts<'a>>, prompts: &PromptEmbeds, negatives: Option<&PromptEmbeds>, record: bool) -> Self {
        Self::with_image(experts, prompts, negatives, None, record)
    }

    /// The same beside what an image encoder says of the P images [P, I, D], for networks that attend to it. Both branches see the image.
    ///
    /// # Panics
    /// As [`new`](Self::new); if the networks have no use for it.
    pub fn with_image<'a>(
        experts: impl Into<Experts<'a>>,
        prompts: &PromptEmbeds,
        negatives: Option<&PromptEmbeds>,
        image: Option<Tensor<3>>,
        record: bool,
    ) -> Self {
        let experts = experts.into();
        let contexts = |text: &PromptEmbeds, image: Option<Tensor<3>>| {
            let context = |network: &WanTransformer| match &image {
                Some(image) => network.text_and_image_context(text, image.clone(), record),
                None => network.text_context(text, record),
            };
            experts.networks().map(context).collect()
        };
        let num_prompts = prompts.batch_size();
        let Some(negatives) = negatives else {
            return Self { contexts: contexts(prompts, image), num_prompts, num_negatives: 0 };
        };
        let num_negatives = negatives.batch_size();
        assert!([1, num_prompts].contains(&num_negatives), "{num_negatives} negative prompts for {num_prompts} prompts");
        // beside an image, the negative prompt is another one for each
        let negatives =
            if image.is_some() && num_negatives == 1 { negatives.select_uncut(&vec![0; num_prompts]) } else { negatives.clone() };
        let images = image.map(|image| Tensor::cat(vec![image.clone(), image], 0));
        Self { contexts: contexts(&PromptEmbeds::cat(prompts, &negatives), images), num_prompts, num_negatives: negatives.batch_size() }
    }

    /// Rows of the context for samples of the given prompts: of their prompts, and of their negative prompts.
    fn rows(&self, samples: &[usize]) -> (Vec<usize>, Vec<usize>) {
        let negative = |&prompt: &usize| self.num_prompts + if self.num_negatives == 1 { 0 } else { prompt };
        (samples.to_vec(), samples.iter().map(negative).collect())
    }
}

/// The guided velocity of a batch of samples. Each sample goes through the network that its timestep belongs to.
#[derive(Debug)]
pub struct GuidedVelocity<'a> {
    /// One or two.
    networks: Vec<Network<'a>>,
    boundary: Option<Boundary>,
    samples: usize,
    /// One for each sample.
    image: Option<ImageCondition>,
}

/// A transformer with its part of the guidance.
#[derive(Debug)]
struct Network<'a> {
    transformer: &'a WanTransformer,
    branches: Branches,
    guidance_scale: f64,
}

#[derive(Debug)]
enum Branches {
    Conditional(TextContext),
    /// 2B rows
    Together(TextContext),
    /// B rows each
    InTurn(Box<[TextContext; 2]>),
}

/// Does the transformer's part: (network, latents, timesteps, text) -> velocity.
type Forward<'f> = &'f mut dyn FnMut(usize, Tensor<5>, &[f64], &TextContext) -> Tensor<5>;

impl<'a> GuidedVelocity<'a> {
    /// For B samples, where sample `b` has prompt `samples[b]` of `text`. A scale of 1 is no guidance: the unconditional branch is not
    /// computed.
    ///
    /// # Panics
    /// If `samples` is empty or names a prompt that `text` lacks, there is guidance but no negative prompt, or the text is of other networks.
    pub fn new(
        experts: impl Into<Experts<'a>>,
        text: &GuidedText,
        samples: &[usize],
        guidance: impl Into<GuidanceScales>,
        batching: GuidanceBatching,
    ) -> Self {
        assert!(samples.iter().all(|&prompt| prompt < text.num_prompts), "{samples:?} of {} prompts", text.num_prompts);
        let (experts, GuidanceScales(scales)) = (experts.into(), guidance.into());
        assert_eq!(text.contexts.len(), experts.networks().count(), "text of other networks");
        let (prompts, negatives) = text.rows(samples);
        let branches = |context: &TextContext, scale: f64| {
            if scale == 1.0 {
                return Branches::Conditional(context.select(&prompts));
            }
            assert!(text.num_negatives > 0, "guidance {scale} needs a negative prompt");
            match batching {
                GuidanceBatching::Together => Branches::Together(context.select(&[prompts.clone(), negatives.clone()].concat())),
                GuidanceBatching::InTurn => Branches::InTurn(Box::new([context.select(&prompts), context.select(&negatives)])),
            }
        };
        let network = |((transformer, context), scale): ((&'a WanTransformer, &TextContext), f64)| Network {
            transformer,
            branches: branches(context, scale),
            guidance_scale: scale,
        };
        let networks = experts.networks().zip(&text.contexts).zip(scales).map(network).collect();
        Self { networks, boundary: experts.boundary(), samples: samples.len(), image: None }
    }

    /// The same of videos that start with `image`, one for each of the B samples, for networks of image-to-video.
    pub fn with_image(self, image: Option<ImageCondition>) -> Self {
        Self { image, ..self }
    }

    /// What is to be denoised of latents of the whole videos, or the velocity of that part, see [`ImageCondition::unknown`].
    pub fn unknown(&self, latents: Tensor<5>) -> Tensor<5> {
        self.image.iter().fold(latents, |latents, image| image.unknown(latents))
    }

    /// Latents of the whole videos.
    pub fn whole(&self, latents: Tensor<5>) -> Tensor<5> {
        self.image.iter().fold(latents, |latents, image| image.whole(latents))
    }

    /// What the networks read: latents, and a timestep for each sample or token.
    fn input(&self, latents: Tensor<5>, timesteps: &[f64]) -> (Tensor<5>, Vec<f64>) {
        let timesteps = if timesteps.len() == 1 { vec![timesteps[0]; self.samples] } else { timesteps.to_vec() };
        let Some(image) = &self.image else { return (latents, timesteps) };
        let latents = image.input(latents);
        let tokens = self.networks[0].transformer.num_tokens(latents.dims());
        let timesteps = if timesteps.len() == self.samples { image.timesteps(&timesteps, tokens, latents.dims()[2]) } else { timesteps };
        (latents, timesteps)
    }

    /// The velocity [B, C, F, H, W] at `latents` of the same shape, f32.
    ///
    /// `timesteps` on the 0..1000 scale: one for all samples, one per sample (B), or one per token (B x L).
    ///
    /// # Panics
    /// If the batch is not that of [`new`](Self::new).
    pub fn velocity(&self, latents: Tensor<5>, timesteps: &[f64]) -> Tensor<5> {
        self.velocity_by(latents, timesteps, &mut |network, latents, timesteps, text| {
            self.networks[network].transformer.forward(latents, timesteps, text)
        })
    }

    /// The velocity as the start of a graph that [`GuidedTrace::backward`] continues: the activations in between are not kept but
    /// computed again. `latents` and the text are plain tensors; other arguments as for [`velocity`](Self::velocity).
    ///
    /// # Panics
    /// As [`velocity`](Self::velocity).
    pub fn velocity_traced(&self, latents: Tensor<5>, timesteps: &[f64]) -> (Tensor<5>, GuidedTrace) {
        let mut passes = Vec::new();
        let velocity = self.velocity_by(latents, timesteps, &mut |network, latents, timesteps, text| {
            let (velocity, trace) = self.networks[network].transformer.forward_traced(latents, timesteps, text);
            let velocity = velocity.autodiff().require_grad();
            passes.push(Pass { network, trace, velocity: velocity.clone() });
            velocity
        });
        (velocity, GuidedTrace { passes })
    }

    /// The two predictions v_cond and v_uncond; no second one without guidance. Arguments as for [`velocity`](Self::velocity).
    ///
    /// # Panics
    /// If the timesteps belong to different networks.
    pub fn predictions(&self, latents: Tensor<5>, timesteps: &[f64]) -> (Tensor<5>, Option<Tensor<5>>) {
        let (latents, timesteps) = self.input(latents, timesteps);
        let network = self.networks_of(&timesteps)[0];
        assert!(self.networks_of(&timesteps).iter().all(|&other| other == network), "timesteps of two networks");
        self.networks[network].branches.predictions(latents, &timesteps, &mut |latents, timesteps, text| {
            self.unknown(self.networks[network].transformer.forward(latents, timesteps, text))
        })
    }

    fn velocity_by(&self, latents: Tensor<5>, timesteps: &[f64], forward: Forward<'_>) -> Tensor<5> {
        assert_eq!(latents.dims()[0], self.samples, "latents of another batch size");
        let (latents, timesteps) = self.input(latents, timesteps);
        let forward = &mut |network: usize, x: Tensor<5>, t: &[f64], text: &TextContext| self.unknown(forward(network, x, t, text));
        let networks = self.networks_of(&timesteps);
        if let Some(&network) = networks.first()
            && networks.iter().all(|&other| other == network)
        {
            let Network { branches, guidance_scale, .. } = &self.networks[network];
            return combined(branches, *guidance_scale, latents, &timesteps, &mut |x, t, text| forward(network, x, t, text));
        }
        let mut rows: Vec<Option<Tensor<5>>> = vec![None; self.samples];
        for (network, Network { branches, guidance_scale, .. }) in self.networks.iter().enumerate() {
            let own: Vec<usize> = (0..self.samples).filter(|&sample| networks[sample] == network).collect();
            let part = Tensor::cat(own.iter().map(|&sample| latents.clone().narrow(0, sample, 1)).collect(), 0);
            let per_sample = timesteps.len() / self.samples;
            let times: Vec<f64> = own.iter().flat_map(|&s| timesteps[s * per_sample..(s + 1) * per_sample].to_vec()).collect();
            let branches = branches.select(&own, self.samples);
            let part = combined(&branches, *guidance_scale, part, &times, &mut |x, t, text| forward(network, x, t, text));
            for (place, sample) in own.into_iter().enumerate() {
                rows[sample] = Some(part.clone().narrow(0, place, 1));
            }
        }
        Tensor::cat(rows.into_iter().flatten().collect(), 0)
    }

    /// The network of each sample: that of its noisiest token.
    fn networks_of(&self, timesteps: &[f64]) -> Vec<usize> {
        let noisiest = |of_sample: &[f64]| of_sample.iter().copied().fold(0.0, f64::max);
        let network = |of_sample: &[f64]| self.boundary.map_or(0, |boundary| boundary.network(noisiest(of_sample)));
        timesteps.chunks(timesteps.len() / self.samples).map(network).collect()
    }
}

impl Branches {
    /// The branches of some of the `batch` samples.
    fn select(&self, samples: &[usize], batch: usize) -> Self {
        match self {
            Self::Conditional(text) => Self::Conditional(text.select(samples)),
            Self::Together(text) => {
                let negatives = samples.iter().map(|sample| batch + sample).collect();
                Self::Together(text.select(&[samples.to_vec(), negatives].concat()))
            }
            Self::InTurn(texts) => Self::InTurn(Box::new([texts[0].select(samples), texts[1].select(samples)])),
        }
    }

    /// See [`GuidedVelocity::predictions`]; a timestep for each sample or token.
    fn predictions(
        &self,
        latents: Tensor<5>,
        timesteps: &[f64],
        forward: &mut dyn FnMut(Tensor<5>, &[f64], &TextContext) -> Tensor<5>,
    ) -> (Tensor<5>, Option<Tensor<5>>) {
        match self {
            Self::Conditional(text) => (forward(latents, timesteps, text), None),
            Self::InTurn(texts) => {
                let [text, negative] = texts.as_ref();
                let conditional = forward(latents.clone(), timesteps, text);
                (conditional, Some(forward(latents, timesteps, negative)))
            }
            Self::Together(text) => {
                let batch = latents.dims()[0];
                let both = Tensor::cat(vec![latents.clone(), latents], 0);
                let velocities = forward(both, &[timesteps, timesteps].concat(), text);
                let half = |from| velocities.clone().narrow(0, from, batch);
                (half(0), Some(half(batch)))
            }
        }
    }
}

/// The guided velocity of samples of one network.
fn combined(
    branches: &Branches,
    guidance_scale: f64,
    latents: Tensor<5>,
    timesteps: &[f64],
    forward: &mut dyn FnMut(Tensor<5>, &[f64], &TextContext) -> Tensor<5>,
) -> Tensor<5> {
    match branches.predictions(latents, timesteps, forward) {
        (conditional, None) => conditional,
        (conditional, Some(unconditional)) => guided(conditional, unconditional, guidance_scale),
    }
}

/// The way back from a velocity of [`GuidedVelocity::velocity_traced`].
#[derive(Debug)]
pub struct GuidedTrace {
    passes: Vec<Pass>,
}

/// A pass through a network, with the prediction that came of it.
#[derive(Debug)]
struct Pass {
    network: usize,
    trace: Trace,
    velocity: Tensor<5>,
}

impl GuidedTrace {
    /// Goes on where `gradients` ended, those of a function of the velocity: backward through the passes of each network.
    ///
    /// # Panics
    /// If the networks are others.
    pub fn backward<'a>(self, experts: impl Into<Experts<'a>>, gradients: &Gradients, receive: Receive<'_>) {
        let mut pending = self.passes;
        for (network, transformer) in experts.into().networks().enumerate() {
            let (own, others): (Vec<Pass>, Vec<Pass>) = pending.into_iter().partition(|pass| pass.network == network);
            pending = others;
            let passes: Vec<_> = own.into_iter().filter_map(|pass| Some((pass.trace, pass.velocity.grad(gradients)?))).collect();
            if !passes.is_empty() {
                transformer.backward_traced(passes, receive);
            }
        }
        assert!(pending.is_empty(), "passes of another network");
    }
}

/// v_uncond + s (v_cond - v_uncond)
fn guided(conditional: Tensor<5>, unconditional: Tensor<5>, guidance_scale: f64) -> Tensor<5> {
    unconditional.clone() + (conditional - unconditional).mul_scalar(guidance_scale)
}
