//! One denoising step as one affine Gaussian; the same three scalars serve sampling, replay, KL and sensitivity.

use serde::{Deserialize, Serialize};

use crate::{NoiseLevel, Schedule};

/// How the log-probability of a step is written down.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Density {
    /// The Gaussian's, `-ms / (2 std^2) - ln std - 0.5 ln(2 pi)`.
    #[default]
    Gaussian,
    /// `-ms` alone, as Flow-CPS has it: the ratio then reacts less at steps with little noise.
    Unnormalised,
}

/// The law of one denoising step given the latents `x` and the velocity `v`:
///
/// ```text
/// mean = a x + b v,    x' = mean + std eps,    eps ~ N(0, I)
///
/// step law        a                        b                                        std
/// ODE (Euler)     1                        dt                                       0
/// flow SDE        1 + s^2/(2 sigma) dt     (1 + s^2 (1-sigma)/(2 sigma)) dt         s sqrt(h)
/// CPS             (1-sigma') + r           -sigma (1-sigma') + (1-sigma) r          sigma' sin(eta pi/2)
///                 with r = sqrt(sigma'^2 - std^2), dt = sigma' - sigma, h = -dt
/// ```
///
/// Flash-GRPO section 3.1; Flow-GRPO eq. 9; DanceGRPO (the flow SDE with constant `s`); Flow-CPS.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Transition {
    /// `a`, the factor of the latents.
    pub latents_coef: f64,
    /// `b`, the factor of the velocity; negative in all laws but an extreme CPS.
    pub velocity_coef: f64,
    /// Standard deviation of each element of `x'`; 0 for the ODE.
    pub std: f64,
    /// How `log_prob` is written down.
    pub density: Density,
}

impl Transition {
    /// The deterministic Euler step `x' = x + dt v`.
    ///
    /// # Panics
    /// If `step` is not a step of the schedule, as everywhere here.
    pub fn ode(schedule: &Schedule, step: usize) -> Transition {
        Transition { latents_coef: 1.0, velocity_coef: schedule.dt(step), std: 0.0, density: Density::Gaussian }
    }

    /// The stochastic step with the given noise level.
    pub fn stochastic(schedule: &Schedule, noise_level: &NoiseLevel, step: usize) -> Transition {
        let (sigma, sigma_next, dt) = (schedule.sigma(step), schedule.sigma_next(step), schedule.dt(step));
        let std = noise_level.std(schedule, step);
        if let NoiseLevel::Cps { density, .. } = *noise_level {
            // x0 and x1 are read off x and v, then mixed again at sigma': (1-sigma') x0 + r x1, r^2 + std^2 = sigma'^2
            let r = (sigma_next * sigma_next - std * std).max(0.0).sqrt();
            return Transition {
                latents_coef: (1.0 - sigma_next) + r,
                velocity_coef: -sigma * (1.0 - sigma_next) + (1.0 - sigma) * r,
                std,
                density,
            };
        }
        let level = noise_level.level(schedule, step);
        let drift = level * level / (2.0 * sigma);
        Transition { latents_coef: 1.0 + drift * dt, velocity_coef: (1.0 + drift * (1.0 - sigma)) * dt, std, density: Density::Gaussian }
    }

    /// `a x + b v` for one element.
    pub fn mean(&self, latents: f64, velocity: f64) -> f64 {
        self.latents_coef * latents + self.velocity_coef * velocity
    }

    /// How strongly the Gaussian's log-probability reacts to the velocity, `lambda = |b| / std`; infinite for the ODE.
    ///
    /// ```text
    /// lambda = sqrt(h)/s + s sqrt(h) (1-sigma)/(2 sigma)          (flow SDE)
    /// d log_prob / d v = -eps lambda / D                          (on policy)
    /// ```
    ///
    /// Flash-GRPO section 3.3 rectifies the loss by `1/lambda`.
    pub fn sensitivity(&self) -> f64 {
        self.velocity_coef.abs() / self.std
    }

    /// The factor `g` of the on-policy gradient `d log_prob / d v = -eps g / D`: lambda, or `2 std^2 lambda` where the density is not
    /// normalised.
    pub fn gradient_scale(&self) -> f64 {
        match self.density {
            Density::Gaussian => self.sensitivity(),
            Density::Unnormalised => 2.0 * self.velocity_coef.abs() * self.std,
        }
    }

    /// Log-density of the recorded `x'`, as a **mean** over the `D` elements (clip ranges are in per-element units):
    ///
    /// ```text
    /// log_prob = -ms / (2 std^2) - ln std - 0.5 ln(2 pi),     ms = mean over D of (x' - mean)^2
    /// log_prob = -ms                                          (density not normalised)
    /// ```
    ///
    /// Take `ms` in f32 or better. Not defined for the ODE (`std` 0).
    pub fn log_prob(&self, mean_square_residual: f64) -> f64 {
        let half_log_two_pi = 0.5 * (2.0 * std::f64::consts::PI).ln();
        match self.density {
            Density::Gaussian => -mean_square_residual / (2.0 * self.std * self.std) - self.std.ln() - half_log_two_pi,
            Density::Unnormalised => -mean_square_residual,
        }
    }

    /// `d log_prob / d ms = -1 / (2 std^2)`, or -1: what a caller multiplies into the gradient of the mean-square residual.
    pub fn log_prob_slope(&self) -> f64 {
        match self.density {
            Density::Gaussian => -0.5 / (self.std * self.std),
            Density::Unnormalised => -1.0,
        }
    }

    /// KL divergence of this step between two policies, per element:
    ///
    /// ```text
    /// kl = 0.5 lambda^2 mean over D of (v - v_ref)^2
    /// ```
    pub fn kl(&self, mean_square_velocity_difference: f64) -> f64 {
        let lambda = self.sensitivity();
        0.5 * lambda * lambda * mean_square_velocity_difference
    }

    /// By how much a stochastic step overshoots the variance of the marginal it should land on:
    ///
    /// ```text
    /// Var(x' | x0) - sigma'^2 = h^2 (s^2/sigma + s^4/(4 sigma^2))     (flow SDE, v exact)
    ///                         = 0                                     (CPS)
    /// ```
    ///
    /// Second order in `h`: it shrinks with more steps. A large value means that the sampled videos look noisy.
    pub fn excess_variance(schedule: &Schedule, noise_level: &NoiseLevel, step: usize) -> f64 {
        if let NoiseLevel::Cps { .. } = noise_level {
            return 0.0;
        }
        let (sigma, h) = (schedule.sigma(step), -schedule.dt(step));
        let level_squared = noise_level.level(schedule, step).powi(2);
        h * h * (level_squared / sigma + level_squared * level_squared / (4.0 * sigma * sigma))
    }
}
