//! From noise to videos' latents, one stochastic step on the way.

use crate::policy::Policy;
use crate::replay::{Conditioning, TransitionBatch, column, evaluate, transition_mean};
use burn::tensor::{Tensor, TensorData};
use grpo::{NoiseLevel, Schedule, StepPlan, Transition};
use wan::guidance::GuidedVelocity;

/// What a batch of rollouts starts from.
pub struct Start<'a> {
    /// x at sigma_0 [B, C, F, H, W].
    pub latents: Tensor<5>,
    /// Prompts and guidance.
    pub conditioning: Conditioning,
    /// The steps of each sample.
    pub plans: &'a [StepPlan],
    /// For each sample the first one of the batch that starts from the same latents with the same prompt: until the first of them draws
    /// noise, they are one and are computed once. The sample itself where nothing is to be shared.
    pub leaders: Vec<usize>,
    /// eps of (sample, step): D standard normal deviates, a function of its arguments.
    pub step_noise: &'a dyn Fn(usize, usize) -> Vec<f32>,
}

/// Finished rollouts.
pub struct Rollouts {
    /// x at sigma = 0 [B, C, F, H, W].
    pub latents: Tensor<5>,
    /// The trained transitions: entry `n` has the n-th trained step of every sample that has so many. Their advantages are
    /// not known yet.
    pub transitions: Vec<TransitionBatch>,
    /// mean over stochastic transitions of `(x' - mean)^2 / std^2`: 1 up to sampling error if the step really is stochastic.
    pub noise_power: f64,
    /// Velocities that were computed: model forwards of one sample, without guidance.
    pub velocities: usize,
}

/// Runs all steps. Every step is x' = a x + b v + std eps, per sample; deterministic ones have std = 0.
pub fn rollout(policy: &Policy, schedule: &Schedule, noise_level: &NoiseLevel, start: Start<'_>) -> Rollouts {
    let text = start.conditioning.text(policy, false);
    let mut of_rows: Option<(Vec<usize>, GuidedVelocity<'_>)> = None;
    let mut latents = start.latents.clone();
    let (mut recorder, mut velocities) = (Recorder::default(), 0);
    for step in 0..schedule.num_steps() {
        let (rows, places) = start.distinct(step);
        velocities += rows.len();
        // the text is gathered anew only when other samples become distinct
        let known = of_rows.take().filter(|(known, _)| *known == rows);
        let (rows, velocity_of) = of_rows.insert(known.unwrap_or_else(|| {
            let velocity_of = start.conditioning.velocity_of(policy, &text, &rows);
            (rows, velocity_of)
        }));
        let velocity = velocity_of.velocity(pick(&latents, rows), &vec![schedule.timestep(step); rows.len()]);
        let velocity = pick(&velocity, &places);
        let transitions: Vec<Transition> = start.plans.iter().map(|plan| transition(plan, schedule, noise_level, step)).collect();
        let next = draw(&latents, &velocity, &transitions, step, start.step_noise);
        recorder.record(step, &start, &transitions, [&latents, &velocity, &next]);
        latents = next;
    }
    Rollouts { latents, noise_power: recorder.noise_power(), transitions: recorder.batches(&start.conditioning), velocities }
}

impl Start<'_> {
    /// The samples that differ at `step`, and for each sample its place among them.
    fn distinct(&self, step: usize) -> (Vec<usize>, Vec<usize>) {
        let together = |sample: usize| {
            let leader = self.leaders[sample];
            let mut group = self.plans.iter().zip(&self.leaders).filter(|(_, l)| **l == leader);
            group.all(|(plan, _)| step <= plan.prefix_len())
        };
        let own = |&sample: &usize| self.leaders[sample] == sample || !together(sample);
        let rows: Vec<usize> = (0..self.plans.len()).filter(own).collect();
        let place = |sample: usize| {
            let of = if own(&sample) { sample } else { self.leaders[sample] };
            rows.iter().position(|&row| row == of).unwrap_or_default()
        };
        let places = (0..self.plans.len()).map(place).collect();
        (rows, places)
    }
}

/// Rows `indices` of `x`.
fn pick(x: &Tensor<5>, indices: &[usize]) -> Tensor<5> {
    if indices.iter().copied().eq(0..x.dims()[0]) {
        return x.clone();
    }
    Tensor::cat(indices.iter().map(|&i| x.clone().narrow(0, i, 1)).collect(), 0)
}

/// The law of one step of one rollout.
fn transition(plan: &StepPlan, schedule: &Schedule, noise_level: &NoiseLevel, step: usize) -> Transition {
    if plan.is_stochastic(step) { Transition::stochastic(schedule, noise_level, step) } else { Transition::ode(schedule, step) }
}

/// x' = a x + b v + std eps
fn draw(
    latents: &Tensor<5>,
    velocity: &Tensor<5>,
    transitions: &[Transition],
    step: usize,
    noise: &dyn Fn(usize, usize) -> Vec<f32>,
) -> Tensor<5> {
    let mean = transition_mean(latents, velocity, transitions);
    if transitions.iter().all(|t| t.std == 0.0) {
        return mean;
    }
    let elements = latents.shape().num_elements() / transitions.len();
    let noise_of = |(sample, t): (usize, &Transition)| if t.std == 0.0 { vec![0.0; elements] } else { noise(sample, step) };
    let eps: Vec<f32> = transitions.iter().enumerate().flat_map(noise_of).collect();
    let eps: Tensor<5> = Tensor::from_data(TensorData::new(eps, latents.dims()), &latents.device());
    mean + eps * column(latents, transitions.iter().map(|t| t.std))
}

/// One sample's transition.
struct Recorded {
    sample: usize,
    step: usize,
    log_prob: f64,
    /// x, v, x' [1, C, F, H, W]
    tensors: [Tensor<5>; 3],
}

/// Collects the trained transitions while the rollout runs.
#[derive(Default)]
struct Recorder {
    /// `slots[n]`: the n-th trained transition of each sample.
    slots: Vec<Vec<Recorded>>,
    taken: Vec<usize>,
    power: (f64, usize),
}

impl Recorder {
    fn record(&mut self, step: usize, start: &Start<'_>, transitions: &[Transition], [x, v, next]: [&Tensor<5>; 3]) {
        self.taken.resize(start.plans.len(), 0);
        if transitions.iter().all(|t| t.std == 0.0) {
            return;
        }
        // deterministic samples of the batch have no density: evaluate them with any std, and ignore the result
        let lawful = |t: &Transition| if t.std == 0.0 { Transition { std: 1.0, ..*t } } else { *t };
        let lawful: Vec<Transition> = transitions.iter().map(lawful).collect();
        let replayed = evaluate(x, v.clone(), next, &lawful);
        let squares = wan::weights::to_floats(replayed.mean_square_residual);
        for (sample, plan) in start.plans.iter().enumerate().filter(|(_, plan)| plan.is_stochastic(step)) {
            self.power.0 += f64::from(squares[sample]) / transitions[sample].std.powi(2);
            self.power.1 += 1;
            if plan.is_trained(step) {
                let tensors = [x, v, next].map(|t| t.clone().narrow(0, sample, 1));
                self.push(Recorded { sample, step, log_prob: replayed.log_probs[sample], tensors });
            }
        }
    }

    fn push(&mut self, recorded: Recorded) {
        let slot = self.taken[recorded.sample];
        self.taken[recorded.sample] += 1;
        if self.slots.len() <= slot {
            self.slots.push(Vec::new());
        }
        self.slots[slot].push(recorded);
    }

    fn noise_power(&self) -> f64 {
        self.power.0 / self.power.1.max(1) as f64
    }

    fn batches(self, conditioning: &Conditioning) -> Vec<TransitionBatch> {
        self.slots.into_iter().map(|slot| batch(slot, conditioning)).collect()
    }
}

/// The transitions of a slot in the order of the samples, so that a replay sees them in the rollout's batch order.
fn batch(mut slot: Vec<Recorded>, conditioning: &Conditioning) -> TransitionBatch {
    slot.sort_by_key(|recorded| recorded.sample);
    let stack = |i: usize| Tensor::cat(slot.iter().map(|recorded| recorded.tensors[i].clone()).collect(), 0);
    let samples: Vec<usize> = slot.iter().map(|recorded| recorded.sample).collect();
    TransitionBatch {
        latents: stack(0),
        old_velocity: Some(stack(1)),
        next_latents: stack(2),
        steps: slot.iter().map(|recorded| recorded.step).collect(),
        old_log_probs: slot.iter().map(|recorded| recorded.log_prob).collect(),
        advantages: vec![0.0; samples.len()],
        conditioning: conditioning.select(&samples),
        samples,
    }
}
