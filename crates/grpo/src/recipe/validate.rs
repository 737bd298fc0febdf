//! Which recipes make sense on how many steps.

use super::{Recipe, StepSharing, StochasticSteps, TrainedSteps};
use crate::loss::check_kl_mask;
use crate::{Density, Error, LossWeight, NoiseLevel, RatioKind};

impl Recipe {
    /// Checks the recipe against the number of steps it will run on.
    ///
    /// # Errors
    /// A pool or window beyond the schedule, a fraction that trains nothing, a noise parameter without noise, or choices that
    /// exclude each other.
    pub fn validate(&self, num_steps: usize) -> Result<(), Error> {
        self.stochastic.validate(num_steps)?;
        self.noise_level.validate()?;
        self.validate_fraction(num_steps)?;
        self.validate_combinations()
    }

    fn validate_fraction(&self, num_steps: usize) -> Result<(), Error> {
        let TrainedSteps::Fraction { fraction } = self.trained else {
            return Ok(());
        };
        if !(fraction > 0.0 && fraction <= 1.0) {
            let hint = "DanceGRPO trains 0.6 of its steps";
            return Err(Error::out_of_range("trained.fraction", fraction, "a number above 0 and at most 1", hint));
        }
        let count = self.stochastic.count(num_steps);
        if self.trained.count(count) > 0 {
            return Ok(());
        }
        let other = format!("stochastic ({count} steps)");
        let hint = "less than one step would be trained; use `trained = { type = \"all\" }`";
        Err(conflict("trained.fraction", fraction, &other, hint))
    }

    fn validate_combinations(&self) -> Result<(), Error> {
        let random = matches!(self.stochastic, StochasticSteps::Random { .. }) || self.trained != TrainedSteps::All;
        if !random && self.sharing == StepSharing::PerRollout {
            let hint = "every rollout has the same steps anyway; use `per-iteration`";
            return Err(conflict("sharing", "per-rollout", "stochastic (no random choice)", hint));
        }
        let is_unnormalised = matches!(self.noise_level, NoiseLevel::Cps { density: Density::Unnormalised, .. });
        if self.ratio == RatioKind::Normalised && is_unnormalised {
            let hint = "the ratio is normalised with the Gaussian's KL; use `density = \"gaussian\"`";
            return Err(conflict("noise_level.density", "unnormalised", "ratio = normalised", hint));
        }
        check_kl_mask(self.kl_mask)?;
        if self.ratio == RatioKind::Normalised && self.loss_weight == LossWeight::NoiseLevel {
            let hint = "the normalised ratio is already scaled by the step's noise; use `uniform` or `rectified`";
            return Err(conflict("loss_weight", "noise-level", "ratio = normalised", hint));
        }
        Ok(())
    }
}

impl StochasticSteps {
    fn validate(&self, num_steps: usize) -> Result<(), Error> {
        if num_steps < 2 {
            let hint = "the last step is always deterministic, so at least two are needed";
            return Err(Error::out_of_range("num_inference_steps", num_steps, "at least 2", hint));
        }
        let usable = num_steps - 1;
        let why = format!("{num_steps} steps leave 0 to {} for noise, the last one stays deterministic", usable - 1);
        match *self {
            StochasticSteps::All => Ok(()),
            StochasticSteps::Random { count, pool } => {
                in_range("stochastic.count", count, usable, &why)?;
                in_range("stochastic.pool", pool, usable + 1 - count, &why)
            }
            StochasticSteps::Sliding { size, stride, every, decay } => {
                in_range("stochastic.size", size, usable, &why)?;
                let places = num_steps - size;
                if places > 1 && stride.is_multiple_of(places) {
                    let expected = format!("no multiple of {places}, the places of the window");
                    let hint = "the window would never move; MixGRPO uses 1";
                    return Err(Error::out_of_range("stochastic.stride", stride, expected, hint));
                }
                in_range("stochastic.every", every as usize, usize::MAX, "iterations a window stays; MixGRPO uses 25")?;
                let rate = decay.map_or(0.0, |decay| decay.rate);
                let hint = "how much shorter a window stays per step; MixGRPO uses 0.1";
                if rate.is_finite() && rate >= 0.0 {
                    return Ok(());
                }
                Err(Error::out_of_range("stochastic.decay.rate", rate, "0 or a positive number", hint))
            }
        }
    }
}

fn in_range(field: &'static str, got: usize, most: usize, hint: &str) -> Result<(), Error> {
    if (1..=most).contains(&got) {
        return Ok(());
    }
    let expected = if most == usize::MAX { "at least 1".to_owned() } else { format!("1 to {most}") };
    Err(Error::out_of_range(field, got, expected, hint))
}

fn conflict(field: &'static str, got: impl ToString, other: &str, hint: &str) -> Error {
    Error::Conflict { field, got: got.to_string(), other: other.to_owned(), hint: hint.to_owned() }
}
