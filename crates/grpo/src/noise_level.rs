//! How much noise a stochastic step injects.

use serde::{Deserialize, Serialize};

use crate::{Density, Error, Schedule};

/// The noise level `s` of a stochastic step, as a function of its sigma.
///
/// `Linear`, `Flow` and `Constant` are levels of the flow SDE, whose step has `std = s sqrt(h)`; `Cps` has its own step law
/// (see [`Transition`](crate::Transition)), and its `level` is the `s` with which a flow SDE would have the same `std`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "kebab-case", deny_unknown_fields)]
pub enum NoiseLevel {
    /// `s = eta (sigma_min + (sigma_max - sigma_min) sigma)` with `sigma_max = sigmas[1]`, `sigma_min = sigmas[N] = 0`
    /// (Flash-GRPO's reference code for Wan).
    Linear {
        /// Scale, 1 as published.
        #[serde(default = "one")]
        eta: f64,
    },
    /// `s = a sqrt(sigma / (1 - sigma))` (Flow-GRPO, eq. 9), with `sigmas[1]` in the denominator at step 0.
    Flow {
        /// Scale, 0.7 as published.
        #[serde(default = "flow_scale")]
        a: f64,
    },
    /// `s = eta` (DanceGRPO).
    Constant {
        /// The level, 0.3 as published.
        #[serde(default = "constant_eta")]
        eta: f64,
    },
    /// Coefficient-preserving sampling: `std = sigma' sin(eta pi / 2)`; it keeps the marginal variance exactly.
    Cps {
        /// Share of the noise that is replaced, in (0, 1], 0.9 as published.
        #[serde(default = "cps_eta")]
        eta: f64,
        /// The Gaussian density, or the published form without its constants.
        #[serde(default)]
        density: Density,
    },
}

fn one() -> f64 {
    1.0
}
fn flow_scale() -> f64 {
    0.7
}
fn constant_eta() -> f64 {
    0.3
}
fn cps_eta() -> f64 {
    0.9
}

impl Default for NoiseLevel {
    fn default() -> Self {
        NoiseLevel::Linear { eta: one() }
    }
}

impl NoiseLevel {
    /// The level of that type with its published parameter: `linear`, `flow`, `constant` or `cps`.
    pub fn named(name: &str) -> Option<NoiseLevel> {
        match name {
            "linear" => Some(NoiseLevel::Linear { eta: one() }),
            "flow" => Some(NoiseLevel::Flow { a: flow_scale() }),
            "constant" => Some(NoiseLevel::Constant { eta: constant_eta() }),
            "cps" => Some(NoiseLevel::Cps { eta: cps_eta(), density: Density::Gaussian }),
            _ => None,
        }
    }

    /// The noise level `s` at `step`, per square root of sigma.
    ///
    /// The guard of `Flow` goes by *index*: on Wan grids sigma_0 is 0.99967 or 0.999999, not 1, and a guard by equality
    /// makes the first step's level explode (695 instead of 5.3 on the `unipc-0.37` grid).
    ///
    /// # Panics
    /// If `step` is not a step of the schedule.
    pub fn level(&self, schedule: &Schedule, step: usize) -> f64 {
        let sigma = schedule.sigma(step);
        match *self {
            NoiseLevel::Linear { eta } => {
                let (sigma_max, sigma_min) = (schedule.sigmas()[1], schedule.sigmas()[schedule.num_steps()]);
                eta * (sigma_min + (sigma_max - sigma_min) * sigma)
            }
            NoiseLevel::Flow { a } => {
                let guarded = if step == 0 { schedule.sigmas()[1] } else { sigma };
                a * (sigma / (1.0 - guarded)).sqrt()
            }
            NoiseLevel::Constant { eta } => eta,
            NoiseLevel::Cps { .. } => self.std(schedule, step) / (-schedule.dt(step)).sqrt(),
        }
    }

    /// Standard deviation of the step: `s sqrt(h)`, or `sigma' sin(eta pi / 2)` for `Cps`.
    pub(crate) fn std(&self, schedule: &Schedule, step: usize) -> f64 {
        match *self {
            NoiseLevel::Cps { eta, .. } => schedule.sigma_next(step) * (eta * std::f64::consts::FRAC_PI_2).sin(),
            _ => self.level(schedule, step) * (-schedule.dt(step)).sqrt(),
        }
    }

    /// # Errors
    /// A parameter that is not a positive number, or an `eta` of `Cps` above 1.
    pub fn validate(&self) -> Result<(), Error> {
        let (field, value, limit) = match *self {
            NoiseLevel::Linear { eta } | NoiseLevel::Constant { eta } => ("noise_level.eta", eta, f64::INFINITY),
            NoiseLevel::Flow { a } => ("noise_level.a", a, f64::INFINITY),
            NoiseLevel::Cps { eta, .. } => ("noise_level.eta", eta, 1.0),
        };
        if value.is_finite() && value > 0.0 && value <= limit {
            return Ok(());
        }
        let expected = if limit == 1.0 { "a number above 0 and at most 1" } else { "a positive number" };
        let hint = "without noise every rollout of a group is the same and nothing can be learned";
        Err(Error::out_of_range(field, value, expected, hint))
    }
}
