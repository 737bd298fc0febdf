//! One optimizer step: replay -> loss -> backward -> clip -> AdamW -> EMA.

use crate::collective::Collective;
use crate::error::Result;
use crate::optimizer::{AdamW, Ema, GradientSum};
use crate::policy::Policy;
use crate::replay::{Replayed, TransitionBatch, evaluate, mean_square};
use crate::step_metrics::{StepMetrics, velocity_gradient};
use crate::stop::Stop;
use burn::tensor::{Tensor, TensorData};
use grpo::{LossTerm, LossWeights, NoiseLevel, PolicyLoss, RatioKind, Schedule, StepChange, Transition};
use serde::Serialize;
use std::collections::BTreeMap;
use std::convert::Infallible;
use wan::weights::to_floats;

/// What turns log-probabilities into a loss.
#[derive(Debug, Clone)]
pub struct Objective {
    /// The grid.
    pub schedule: Schedule,
    /// The noise of stochastic steps.
    pub noise_level: NoiseLevel,
    /// Weight of each step's loss.
    pub weights: LossWeights,
    /// Ratio, trust region and KL.
    pub loss: PolicyLoss,
}

/// What one update did.
#[derive(Debug, Clone, Default, Serialize)]
pub struct UpdateMetrics {
    /// log_prob of every transition under the weights before the update.
    pub log_prob: Vec<f64>,
    /// Probability ratio of every transition.
    pub ratio: Vec<f64>,
    /// Mean loss.
    pub loss: f64,
    /// Mean KL to the reference policy (0 unless `kl_beta` is set).
    pub kl: f64,
    /// Global norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Share of transitions whose ratio is outside the clip range.
    pub clip_fraction: f64,
    /// By denoising step.
    pub steps: BTreeMap<usize, StepMetrics>,
    /// (sample, step) of transitions without a finite log-probability: they were left out.
    #[serde(skip)]
    pub skipped: Vec<(usize, usize)>,
    /// Whether the gradient was not finite: nothing was changed then.
    #[serde(skip)]
    pub is_skipped: bool,
}

impl UpdateMetrics {
    /// max |ratio - 1|
    pub fn ratio_deviation(&self) -> f64 {
        self.ratio.iter().map(|r| (r - 1.0).abs()).fold(0.0, f64::max)
    }
}

impl Objective {
    /// The laws of a batch's transitions.
    pub fn transitions(&self, steps: &[usize]) -> Vec<Transition> {
        steps.iter().map(|&step| Transition::stochastic(&self.schedule, &self.noise_level, step)).collect()
    }

    /// Replays a batch with a graph and backpropagates its share of `1/count sum_i loss_i`.
    ///
    /// The loss is a function of few scalars, so it is computed in f64; what enters the graph is
    /// `sum_i d loss/d log_prob_i * d log_prob_i/d ms_i * ms_i`, whose gradient is that of the loss.
    pub fn backward(
        &self,
        policy: &Policy,
        batch: &TransitionBatch,
        count: usize,
        gradients: &mut GradientSum,
        metrics: &mut UpdateMetrics,
    ) {
        let transitions = self.transitions(&batch.steps);
        let replayed = match &batch.retained {
            Some(velocity) => evaluate(&batch.latents, velocity.clone(), &batch.next_latents, &transitions),
            None => batch.replay(policy, &self.schedule, &transitions, true),
        };
        let (usable, unusable): (Vec<usize>, Vec<usize>) =
            (0..batch.len()).partition(|&i| (replayed.log_probs[i] - batch.old_log_probs[i]).is_finite());
        if !unusable.is_empty() {
            // once more without them: in one graph, their gradient of 0 times infinity would reach the weights
            metrics.skipped.extend(unusable.iter().map(|&i| (batch.samples[i], batch.steps[i])));
            if !usable.is_empty() {
                self.backward(policy, &batch.select(&usable), count, gradients, metrics);
            }
            return;
        }
        let change = self.velocity_change(batch, &replayed);
        let terms = self.terms(batch, &replayed, &transitions, change.as_ref());
        let scale = 1.0 / count as f64;
        let slopes = terms.iter().zip(&transitions).map(|(term, t)| scale * term.grad_log_prob * t.log_prob_slope());
        let mut surrogate = weighted_sum(&replayed.mean_square_residual, slopes);
        if let Some(change) = change.as_ref().filter(|_| self.loss.ratio == RatioKind::Normalised) {
            // the normalised ratio also depends on v through its drift lambda^2/2 ms(v - v_old)
            surrogate =
                surrogate + weighted_sum(change, terms.iter().zip(&transitions).map(|(term, t)| scale * term.grad_log_prob * t.kl(1.0)));
        }
        if self.loss.kl_beta > 0.0 {
            let distance = self.reference_distance(policy, batch, &replayed);
            let kl: Vec<f64> = to_floats(distance.clone()).iter().zip(&transitions).map(|(&ms, t)| t.kl(f64::from(ms))).collect();
            metrics.kl += scale * kl.iter().sum::<f64>();
            metrics.loss += scale * kl.iter().map(|&kl| self.loss.kl_term(kl)).sum::<f64>();
            surrogate = surrogate + weighted_sum(&distance, transitions.iter().map(|t| scale * self.loss.kl_beta * t.kl(1.0)));
        }
        metrics.loss += scale * terms.iter().map(|term| term.loss).sum::<f64>();
        metrics.clip_fraction += scale * terms.iter().filter(|term| term.clipped).count() as f64;
        let squares = to_floats(replayed.mean_square_residual.clone());
        for (i, (term, transition)) in terms.iter().zip(&transitions).enumerate() {
            let gradient = velocity_gradient(term, transition, f64::from(squares[i]));
            let own = StepMetrics::of(self.weights.weight(batch.steps[i]), gradient, term.clipped);
            metrics.steps.entry(batch.steps[i]).or_default().merge(&own);
        }
        metrics.ratio.extend(terms.iter().map(|term| term.ratio));
        metrics.log_prob.extend(&replayed.log_probs);
        replayed.backward(&surrogate, policy, gradients);
    }

    /// mean over D of (v - v_old)^2 `[B]`, where the loss needs it.
    fn velocity_change(&self, batch: &TransitionBatch, replayed: &Replayed) -> Option<Tensor<1>> {
        let old = batch.old_velocity.as_ref().filter(|_| self.loss.needs_change())?;
        Some(mean_square(replayed.velocity.clone() - old.clone()))
    }

    fn terms(&self, batch: &TransitionBatch, replayed: &Replayed, transitions: &[Transition], change: Option<&Tensor<1>>) -> Vec<LossTerm> {
        let change = change.map_or(vec![0.0; batch.len()], |change| to_floats(change.clone()));
        (0..batch.len())
            .map(|i| {
                let weight = self.weights.weight(batch.steps[i]);
                let change = StepChange::new(&transitions[i], f64::from(change[i]));
                self.loss.term(replayed.log_probs[i], batch.old_log_probs[i], batch.advantages[i], weight, change)
            })
            .collect()
    }

    /// mean over D of (v - v_ref)^2 `[B]`; the KL to the reference is lambda^2/2 times that.
    fn reference_distance(&self, policy: &Policy, batch: &TransitionBatch, replayed: &Replayed) -> Tensor<1> {
        let transitions = self.transitions(&batch.steps);
        let reference = policy.with_reference(|| batch.replay(policy, &self.schedule, &transitions, false));
        mean_square(replayed.velocity.clone() - reference.velocity)
    }
}

/// One update over all `batches` (micro-batches of one update).
///
/// A gradient that is not finite changes nothing; `is_skipped` tells.
///
/// # Errors
/// A request to stop, between two micro-batches; nothing has changed then.
pub fn update(
    policy: &Policy,
    optimizer: &mut AdamW,
    ema: Option<&mut Ema>,
    objective: &Objective,
    batches: &[TransitionBatch],
    collective: &dyn Collective,
    stop: &Stop,
) -> Result<UpdateMetrics> {
    let (mut gradients, mut metrics) = accumulate_while(policy, objective, batches, || stop.check())?;
    gradients.all_reduce(collective);
    metrics.grad_norm = gradients.clip(optimizer.config.max_grad_norm);
    if !metrics.grad_norm.is_finite() {
        metrics.is_skipped = true;
        return Ok(metrics);
    }
    optimizer.step(policy.params(), &gradients);
    if let Some(ema) = ema {
        ema.update(policy.params());
    }
    Ok(metrics)
}

/// Gradient of the mean loss over all transitions of `batches`, before clipping. Samples without advantage stay in the
/// denominator (Deviation D5, docs/deviations.md).
pub fn accumulate(policy: &Policy, objective: &Objective, batches: &[TransitionBatch]) -> (GradientSum, UpdateMetrics) {
    let Ok(sums) = accumulate_while(policy, objective, batches, || Ok::<(), Infallible>(()));
    sums
}

/// The same, which asks before every micro-batch whether to go on. A micro-batch is on the policy's device only while it is its turn.
fn accumulate_while<E>(
    policy: &Policy,
    objective: &Objective,
    batches: &[TransitionBatch],
    go_on: impl Fn() -> std::result::Result<(), E>,
) -> std::result::Result<(GradientSum, UpdateMetrics), E> {
    let mut gradients = GradientSum::new(policy.params());
    let mut metrics = UpdateMetrics::default();
    let count = batches.iter().map(TransitionBatch::len).sum();
    for batch in batches {
        go_on()?;
        objective.backward(policy, &batch.to_device(&policy.device()), count, &mut gradients, &mut metrics);
    }
    Ok((gradients, metrics))
}

/// sum_i w_i x_i, with constant w.
fn weighted_sum(x: &Tensor<1>, weights: impl Iterator<Item = f64>) -> Tensor<1> {
    let weights: Vec<f32> = weights.map(|w| w as f32).collect();
    let count = weights.len();
    let weights: Tensor<1> = Tensor::from_data(TensorData::new(weights, [count]), &x.device().inner());
    (x.clone() * weights).sum()
}
