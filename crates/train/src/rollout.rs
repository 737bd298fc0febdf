//! From noise to videos' latents, one stochastic step on the way.

use crate::policy::Policy;
use crate::replay::{Conditioning, TransitionBatch, column, evaluate, pick, transition_mean};
use crate::sharing::{Shares, first_of_each};
use burn::tensor::{Tensor, TensorData};
use grpo::{NoiseLevel, Schedule, StepPlan, Transition};
use wan::guidance::{GuidedText, GuidedVelocity};
use wan::solver::{Solver, SolverKind};
use wan::weights::to_floats;

/// What a batch of rollouts starts from.
pub struct Start<'a> {
    /// x at sigma_0 [B, C, F, H, W]: what is to be denoised (`Conditioning::unknown`).
    pub latents: Tensor<5>,
    /// Prompts and guidance.
    pub conditioning: Conditioning,
    /// Who shares what.
    pub shares: Shares<'a>,
    /// Keep the graph of the trained steps, for an update before the weights change.
    pub retain: bool,
    /// eps of (sample, step): D standard normal deviates, a function of its arguments.
    pub step_noise: &'a dyn Fn(usize, usize) -> Vec<f32>,
}

/// Finished rollouts.
pub struct Rollouts {
    /// x at sigma = 0 [B, C, F, H, W], of the whole videos.
    pub latents: Tensor<5>,
    /// The trained transitions, a batch for each step that any sample trains. Their advantages are not known yet.
    pub transitions: Vec<TransitionBatch>,
    /// mean over stochastic transitions of `(x' - mean)^2 / std^2`: 1 up to sampling error if the step really is stochastic.
    pub noise_power: f64,
    /// Velocities that were computed: model forwards of one sample, without guidance.
    pub velocities: usize,
}

/// Runs all steps. Every step is x' = a x + b v + std eps, per sample; deterministic ones have std = 0.
pub fn rollout(policy: &Policy, schedule: &Schedule, noise_level: &NoiseLevel, start: Start<'_>) -> Rollouts {
    let mut sampler =
        Sampler { policy, schedule, start: &start, text: start.conditioning.text(policy, false), of_rows: None, velocities: 0 };
    let mut latents = start.latents.clone();
    let mut recorder = Recorder::default();
    for step in 0..schedule.num_steps() {
        let running = start.shares.running(step);
        if running.is_empty() {
            break;
        }
        let (velocity, retained) = sampler.velocity(step, &running, &latents);
        let law = |sample: usize, plan: &StepPlan| if running.contains(&sample) { law(plan, schedule, noise_level, step) } else { REST };
        let transitions: Vec<Transition> = start.shares.plans.iter().enumerate().map(|(sample, plan)| law(sample, plan)).collect();
        let next = draw(&latents, &velocity, &transitions, step, start.step_noise);
        recorder.record(step, &start, &transitions, [&latents, &velocity, &next], retained);
        latents = next;
    }
    let latents = start.conditioning.whole(sampler.suffixes(latents));
    Rollouts { latents, noise_power: recorder.noise_power(), transitions: recorder.batches, velocities: sampler.velocities }
}

/// Computes velocities, each distinct one once.
struct Sampler<'a> {
    policy: &'a Policy,
    schedule: &'a Schedule,
    start: &'a Start<'a>,
    text: GuidedText,
    /// The text of the samples that were distinct last; it is gathered anew only when others become so.
    of_rows: Option<(Vec<usize>, GuidedVelocity<'a>)>,
    velocities: usize,
}

impl Sampler<'_> {
    /// v of all samples [B, C, F, H, W], 0 for those that do not run; and, if graphs are kept, that of the trained ones with its graph.
    fn velocity(&mut self, step: usize, running: &[usize], latents: &Tensor<5>) -> (Tensor<5>, Option<Tensor<5>>) {
        let trained = |sample: &usize| self.start.retain && self.start.shares.plans[*sample].is_trained(step);
        let (kept, others): (Vec<usize>, Vec<usize>) = running.iter().partition(|sample| trained(sample));
        let retained = (!kept.is_empty()).then(|| self.recorded(step, &kept, latents));
        let parts = [
            (!others.is_empty()).then(|| self.plain(step, &others, latents)).map(|velocity| (others, velocity)),
            retained.clone().map(|velocity| (kept, velocity.inner())),
        ];
        (scatter(parts.into_iter().flatten(), latents), retained)
    }

    /// v of `samples`, without a graph.
    fn plain(&mut self, step: usize, samples: &[usize], latents: &Tensor<5>) -> Tensor<5> {
        let (rows, places) = self.start.shares.distinct(step, samples);
        self.velocities += rows.len();
        let known = self.of_rows.take().filter(|(known, _)| *known == rows);
        let (rows, velocity_of) = self.of_rows.insert(known.unwrap_or_else(|| {
            let velocity_of = self.start.conditioning.velocity_of(self.policy, &self.text, &rows, latents.dims());
            (rows, velocity_of)
        }));
        let velocity = velocity_of.velocity(pick(latents, rows), &vec![self.schedule.timestep(step); rows.len()]);
        pick(&velocity, &places)
    }

    /// v of `samples` with its graph, computed as a replay computes it.
    fn recorded(&mut self, step: usize, samples: &[usize], latents: &Tensor<5>) -> Tensor<5> {
        let owners: Vec<usize> = samples.iter().map(|&sample| self.start.shares.owner(sample, step)).collect();
        self.velocities += first_of_each(&owners).0.len();
        let conditioning = self.start.conditioning.select(samples);
        let timesteps = vec![self.schedule.timestep(step); samples.len()];
        conditioning.distinct_velocity(self.policy, &pick(latents, samples), &owners, &timesteps, true)
    }

    /// Takes the samples that have nothing random before them to the end, in few steps of second order.
    fn suffixes(&mut self, latents: Tensor<5>) -> Tensor<5> {
        let mut parts = Vec::new();
        for (start, samples) in self.start.shares.suffixes() {
            let left = self.schedule.num_steps() - start;
            let schedule = self.schedule.thinned(start, self.start.shares.suffix.unwrap_or(left).min(left));
            let velocity_of = self.start.conditioning.velocity_of(self.policy, &self.text, &samples, latents.dims());
            let mut solver = Solver::new(SolverKind::Unipc, schedule.clone());
            let mut x = pick(&latents, &samples);
            for step in 0..schedule.num_steps() {
                let velocity = velocity_of.velocity(x.clone(), &vec![schedule.timestep(step); samples.len()]);
                x = solver.step(step, velocity, x);
            }
            self.velocities += samples.len() * schedule.num_steps();
            parts.push((samples, x));
        }
        if parts.is_empty() { latents } else { scatter(parts.into_iter(), &latents) }
    }
}

/// Rows of the parts at the places of their samples; 0 for samples of no part.
fn scatter(parts: impl Iterator<Item = (Vec<usize>, Tensor<5>)>, like: &Tensor<5>) -> Tensor<5> {
    let batch = like.dims()[0];
    let mut rows: Vec<Option<Tensor<5>>> = vec![None; batch];
    for (samples, part) in parts {
        if samples.len() == batch {
            return part; // all of them, in order
        }
        for (place, sample) in samples.into_iter().enumerate() {
            rows[sample] = Some(part.clone().narrow(0, place, 1));
        }
    }
    let zeros = || like.clone().narrow(0, 0, 1).zeros_like();
    Tensor::cat(rows.into_iter().map(|row| row.unwrap_or_else(zeros)).collect(), 0)
}

/// x' = x: what a sample does that waits for its suffix.
const REST: Transition = Transition { latents_coef: 1.0, velocity_coef: 0.0, std: 0.0, density: grpo::Density::Gaussian };

/// The law of one step of one rollout.
fn law(plan: &StepPlan, schedule: &Schedule, noise_level: &NoiseLevel, step: usize) -> Transition {
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

/// Collects the trained transitions while the rollout runs.
#[derive(Default)]
struct Recorder {
    batches: Vec<TransitionBatch>,
    power: (f64, usize),
}

impl Recorder {
    fn record(
        &mut self,
        step: usize,
        start: &Start<'_>,
        transitions: &[Transition],
        [x, v, next]: [&Tensor<5>; 3],
        retained: Option<Tensor<5>>,
    ) {
        let plans = start.shares.plans;
        let stochastic: Vec<usize> = (0..plans.len()).filter(|&sample| plans[sample].is_stochastic(step)).collect();
        if stochastic.is_empty() {
            return;
        }
        let laws: Vec<Transition> = stochastic.iter().map(|&sample| transitions[sample]).collect();
        let replayed = evaluate(&pick(x, &stochastic), pick(v, &stochastic), &pick(next, &stochastic), &laws);
        let squares = to_floats(replayed.mean_square_residual);
        self.power.0 += squares.iter().zip(&laws).map(|(&ms, law)| f64::from(ms) / law.std.powi(2)).sum::<f64>();
        self.power.1 += stochastic.len();
        let log_prob_of = |sample: usize| stochastic.iter().position(|&s| s == sample).map_or(f64::NAN, |i| replayed.log_probs[i]);
        let samples: Vec<usize> = stochastic.iter().copied().filter(|&sample| plans[sample].is_trained(step)).collect();
        if samples.is_empty() {
            return;
        }
        self.batches.push(TransitionBatch {
            latents: pick(x, &samples),
            old_velocity: Some(pick(v, &samples)),
            next_latents: pick(next, &samples),
            retained,
            owners: samples.iter().map(|&sample| start.shares.owner(sample, step)).collect(),
            steps: vec![step; samples.len()],
            old_log_probs: samples.iter().map(|&sample| log_prob_of(sample)).collect(),
            advantages: vec![0.0; samples.len()],
            conditioning: start.conditioning.select(&samples),
            samples,
        });
    }

    fn noise_power(&self) -> f64 {
        self.power.0 / self.power.1.max(1) as f64
    }
}
