//! How much the policy loss of each step counts.

use serde::{Deserialize, Serialize};

use crate::{Error, RatioKind, Recipe, Schedule, Transition};

/// The weight of a step's policy loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LossWeight {
    /// 1 for every step.
    #[default]
    Uniform,
    /// `w_k = (1/lambda_k) / mean over the pool of (1/lambda)`: the policy gradient has the same scale at every step
    /// (temporal gradient rectification, Flash-GRPO section 3.3).
    Rectified,
    /// `w_k = std_k / mean over the pool of std`: steps that explore more count more (TempFlow-GRPO).
    NoiseLevel,
}

/// The weights of one recipe on one schedule; they average 1 over the pool of steps that can be stochastic.
///
/// The reference looks 1/lambda up in a table of ten numbers that is right for one grid of one library version (Deviation
/// D1), and normalises by the mean of the microbatch, which undoes the rectification whenever a microbatch holds a single
/// step (D2; docs/deviations.md). Here both follow from the schedule.
#[derive(Clone, Debug, PartialEq)]
pub struct LossWeights {
    pool: Vec<usize>,
    weights: Vec<f64>,
}

impl LossWeights {
    /// # Errors
    /// A recipe that does not fit the schedule, or a step of the pool whose weight is not a positive number.
    pub fn new(recipe: &Recipe, schedule: &Schedule) -> Result<LossWeights, Error> {
        recipe.validate(schedule.num_steps())?;
        let pool = recipe.stochastic.pool(schedule.num_steps());
        let raw: Vec<f64> = pool.iter().map(|&step| raw_weight(recipe, schedule, step)).collect();
        if let Some(place) = raw.iter().position(|weight| !(weight.is_finite() && *weight > 0.0)) {
            return Err(Error::Conflict {
                field: "noise_level",
                got: format!("{:?}", recipe.noise_level).to_lowercase(),
                other: format!("step {}", pool[place]),
                hint: "the step has no noise or no dependence on the velocity; change the noise level or shrink the pool".into(),
            });
        }
        let mean = raw.iter().sum::<f64>() / raw.len() as f64;
        let mut weights = vec![0.0; schedule.num_steps()];
        for (&step, weight) in pool.iter().zip(raw) {
            weights[step] = weight / mean;
        }
        Ok(LossWeights { pool, weights })
    }

    /// The weight of `step`; 0 outside the pool.
    ///
    /// # Panics
    /// If `step` is not a step of the schedule.
    pub fn weight(&self, step: usize) -> f64 {
        self.weights[step]
    }

    /// The steps that can be stochastic, ascending.
    pub fn pool(&self) -> &[usize] {
        &self.pool
    }
}

fn raw_weight(recipe: &Recipe, schedule: &Schedule, step: usize) -> f64 {
    let transition = Transition::stochastic(schedule, &recipe.noise_level, step);
    match (recipe.loss_weight, recipe.ratio) {
        (LossWeight::Uniform, _) => 1.0,
        (LossWeight::NoiseLevel, _) => transition.std,
        (LossWeight::Rectified, RatioKind::Plain) => 1.0 / transition.gradient_scale(),
        // the normalised ratio already carries a factor std
        (LossWeight::Rectified, RatioKind::Normalised) => 1.0 / (transition.gradient_scale() * transition.std),
    }
}
