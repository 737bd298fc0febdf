//! What `flash-grpo inspect` shows: the numbers each step will use.

use grpo::{LossWeights, Transition};
use serde::Serialize;

use super::Settings;

/// One denoising step of the rollouts.
///
/// Steps outside the pool are deterministic: no noise, an unbounded sensitivity (`None`), weight 0.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepRow {
    /// Index in the schedule.
    pub step: usize,
    /// Where the step starts.
    pub sigma: f64,
    /// Where it ends.
    pub sigma_next: f64,
    /// What the network is called with.
    pub timestep: f64,
    /// `s`, the noise level when the step is stochastic.
    pub noise_level: f64,
    /// Standard deviation of that noise, per element.
    pub std: f64,
    /// `lambda = |b| / std`.
    pub sensitivity: Option<f64>,
    /// Variance beyond the marginal's.
    pub excess_variance: f64,
    /// Weight of the policy loss.
    pub loss_weight: f64,
}

impl Settings {
    /// The step table of the rollouts.
    ///
    /// # Errors
    /// None after [`Settings::load`]; values set by hand may not fit together.
    pub fn step_table(&self) -> Result<Vec<StepRow>, grpo::Error> {
        let (schedule, recipe) = (self.schedule()?, self.recipe());
        let weights = LossWeights::new(&recipe, &schedule)?;
        let row = |step: usize| {
            let in_pool = weights.pool().contains(&step);
            let transition = Transition::stochastic(&schedule, &recipe.noise_level, step);
            let when_stochastic = |value: f64| if in_pool { value } else { 0.0 };
            StepRow {
                step,
                sigma: schedule.sigma(step),
                sigma_next: schedule.sigma_next(step),
                timestep: schedule.timestep(step),
                noise_level: when_stochastic(recipe.noise_level.level(&schedule, step)),
                std: when_stochastic(transition.std),
                sensitivity: in_pool.then(|| transition.sensitivity()),
                excess_variance: when_stochastic(Transition::excess_variance(&schedule, &recipe.noise_level, step)),
                loss_weight: weights.weight(step),
            }
        };
        Ok((0..schedule.num_steps()).map(row).collect())
    }
}
