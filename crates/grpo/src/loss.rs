//! The clipped policy loss. The tensor graph ends at `log_prob`; everything after it is a handful of f64 scalars.

use serde::{Deserialize, Serialize};

use crate::{Error, Transition};

/// How the probability ratio is formed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RatioKind {
    /// `exp(log_prob - old_log_prob)`.
    #[default]
    Plain,
    /// `exp((log_prob - old_log_prob + drift) std)` with `drift` = [`StepChange::kl`] (GRPO-Guard, arXiv 2510.22319, eq. 8).
    ///
    /// With many elements the log-ratio is dominated by its bias `-lambda^2 ms(dv)/2`, so plain clipping becomes a one-sided rail:
    /// samples leave the range downwards whatever their advantage. Adding the drift back centres the ratio on 1, and the factor `std`
    /// gives it the same spread at every step.
    Normalised,
}

/// How far the law of a sample's step has moved since the rollout.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepChange {
    /// `|mean - old_mean|^2 / (2 std^2)` per element: the KL divergence of the two laws, [`Transition::kl`] of the velocity's change.
    pub kl: f64,
    /// The step's `std`.
    pub std: f64,
}

impl StepChange {
    /// From the mean over elements of `(v - v_old)^2`, `v_old` the velocity during the rollout.
    pub fn new(transition: &Transition, mean_square_velocity_change: f64) -> StepChange {
        StepChange { kl: transition.kl(mean_square_velocity_change), std: transition.std }
    }
}

/// The clipped surrogate of PPO with an optional KL penalty:
///
/// ```text
/// ratio = exp(log_prob - old_log_prob)
/// loss  = w max( -A ratio, -A clip(ratio, 1 - c, 1 + c) ) + beta kl
/// ```
///
/// Flash-GRPO section 3.1 (beta 0, c 1e-3). One term is one sample at one step; the caller divides by the number of terms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PolicyLoss {
    /// Plain or normalised.
    pub ratio: RatioKind,
    /// `c`, in units of the per-element log-probability.
    pub clip_range: f64,
    /// Instead of the clip: a sample whose step has moved by more than this KL per element, and would move on, has no gradient.
    ///
    /// ```text
    /// loss = -w A ratio,    without gradient if  kl > mask  and  A (ratio - 1) > 0
    /// ```
    ///
    /// The KL of two Gaussians is known exactly, the ratio is one noisy sample of it (Flow-DPPO).
    pub kl_mask: Option<f64>,
    /// `beta`, the weight of the KL to the reference policy; 0 in the paper.
    pub kl_beta: f64,
}

/// One sample's share of the loss, and what to backpropagate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossTerm {
    /// `w max(-A ratio, -A clip(ratio))`.
    pub loss: f64,
    /// `d loss / d log_prob`; with a normalised ratio it is also `d loss / d drift`.
    pub grad_log_prob: f64,
    /// The (possibly normalised) ratio; exactly 1 on policy.
    pub ratio: f64,
    /// Whether the sample is outside `1 +- clip_range`, or beyond `kl_mask` (whichever side of the advantage: the usual clip fraction).
    pub clipped: bool,
}

impl PolicyLoss {
    /// The paper's: plain ratio, clipped.
    ///
    /// # Errors
    /// As [`validate`](Self::validate).
    pub fn new(clip_range: f64, kl_beta: f64) -> Result<PolicyLoss, Error> {
        let loss = PolicyLoss { ratio: RatioKind::Plain, clip_range, kl_mask: None, kl_beta };
        loss.validate().map(|()| loss)
    }

    /// # Errors
    /// A clip range or KL mask that is not a positive number, or a `kl_beta` that is not a number from 0.
    pub fn validate(&self) -> Result<(), Error> {
        if !(self.clip_range.is_finite() && self.clip_range > 0.0) {
            let hint = "the published value is 1e-3; it is in units of the mean log-probability per element";
            return Err(Error::out_of_range("clip_range", self.clip_range, "a positive number", hint));
        }
        check_kl_mask(self.kl_mask)?;
        if !(self.kl_beta.is_finite() && self.kl_beta >= 0.0) {
            return Err(Error::out_of_range("kl_beta", self.kl_beta, "0 or a positive number", "0 switches the KL penalty off"));
        }
        Ok(())
    }

    /// Whether a term depends on [`StepChange`], so that the velocity's change has to be measured.
    pub fn needs_change(&self) -> bool {
        self.ratio == RatioKind::Normalised || self.kl_mask.is_some()
    }

    /// The term of one sample. `advantage` is already clamped, `weight` the step's loss weight.
    pub fn term(&self, log_prob: f64, old_log_prob: f64, advantage: f64, weight: f64, change: StepChange) -> LossTerm {
        let (drift, scale) = match self.ratio {
            RatioKind::Plain => (0.0, 1.0),
            RatioKind::Normalised => (change.kl, change.std),
        };
        let ratio = ((log_prob - old_log_prob + drift) * scale).exp();
        let unclipped = -advantage * ratio;
        // d(-A ratio)/d log_prob = -A ratio scale; outside the trust region the loss is flat
        let (loss, is_flat, clipped) = match self.kl_mask {
            None => {
                let clipped = -advantage * ratio.clamp(1.0 - self.clip_range, 1.0 + self.clip_range);
                (unclipped.max(clipped), unclipped < clipped, (ratio - 1.0).abs() > self.clip_range)
            }
            Some(mask) => (unclipped, change.kl > mask && advantage * (ratio - 1.0) > 0.0, change.kl > mask),
        };
        let slope = if is_flat { 0.0 } else { unclipped * scale };
        LossTerm { loss: weight * loss, grad_log_prob: weight * slope, ratio, clipped }
    }

    /// The KL penalty of one sample, `beta kl`, from [`Transition::kl`]; its derivative by `kl` is `beta`.
    pub fn kl_term(&self, kl: f64) -> f64 {
        self.kl_beta * kl
    }
}

/// A KL mask is positive, where there is one.
pub(crate) fn check_kl_mask(mask: Option<f64>) -> Result<(), Error> {
    let Some(mask) = mask.filter(|mask| !(mask.is_finite() && *mask > 0.0)) else { return Ok(()) };
    let hint = "a KL per element; leave it out to clip the ratio instead";
    Err(Error::out_of_range("kl_mask", mask, "a positive number", hint))
}
