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
    /// `exp((log_prob - old_log_prob + drift) scale)` (GRPO-Guard, arXiv 2510.22319, eq. 8), see [`RatioNormalisation`].
    Normalised,
}

/// The two scalars of GRPO-Guard's ratio.
///
/// With many elements the log-ratio is dominated by its bias `-lambda^2 ms(dv)/2`, so plain clipping becomes a one-sided
/// rail: samples leave the range downwards whatever their advantage. Adding the drift back centres the ratio on 1, and the
/// factor `std` gives it the same spread at every step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RatioNormalisation {
    /// `|mean - old_mean|^2 / (2 std^2)` per element, which is [`Transition::kl`] of the velocity's change since the rollout.
    pub drift: f64,
    /// The step's `std`.
    pub scale: f64,
}

impl RatioNormalisation {
    /// The plain ratio: no drift, scale 1.
    pub const NONE: RatioNormalisation = RatioNormalisation { drift: 0.0, scale: 1.0 };

    /// From the mean over elements of `(v - v_old)^2`, `v_old` the velocity during the rollout.
    pub fn new(kind: RatioKind, transition: &Transition, mean_square_velocity_change: f64) -> RatioNormalisation {
        match kind {
            RatioKind::Plain => RatioNormalisation::NONE,
            RatioKind::Normalised => RatioNormalisation { drift: transition.kl(mean_square_velocity_change), scale: transition.std },
        }
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
pub struct ClippedLoss {
    /// `c`, in units of the per-element log-probability.
    pub clip_range: f64,
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
    /// Whether the ratio is outside `1 +- clip_range` (whichever side of the advantage: the usual clip fraction).
    pub clipped: bool,
}

impl ClippedLoss {
    /// # Errors
    /// A clip range that is not a positive number, or a `kl_beta` that is not a number from 0.
    pub fn new(clip_range: f64, kl_beta: f64) -> Result<ClippedLoss, Error> {
        if !(clip_range.is_finite() && clip_range > 0.0) {
            let hint = "the published value is 1e-3; it is in units of the mean log-probability per element";
            return Err(Error::out_of_range("clip_range", clip_range, "a positive number", hint));
        }
        if !(kl_beta.is_finite() && kl_beta >= 0.0) {
            return Err(Error::out_of_range("kl_beta", kl_beta, "0 or a positive number", "0 switches the KL penalty off"));
        }
        Ok(ClippedLoss { clip_range, kl_beta })
    }

    /// The term of one sample with the plain ratio. `advantage` is already clamped, `weight` the step's loss weight.
    pub fn term(&self, log_prob: f64, old_log_prob: f64, advantage: f64, weight: f64) -> LossTerm {
        self.normalised_term(log_prob, old_log_prob, advantage, weight, RatioNormalisation::NONE)
    }

    /// The same with GRPO-Guard's ratio.
    pub fn normalised_term(
        &self,
        log_prob: f64,
        old_log_prob: f64,
        advantage: f64,
        weight: f64,
        normalisation: RatioNormalisation,
    ) -> LossTerm {
        let RatioNormalisation { drift, scale } = normalisation;
        let ratio = ((log_prob - old_log_prob + drift) * scale).exp();
        let (low, high) = (1.0 - self.clip_range, 1.0 + self.clip_range);
        let unclipped = -advantage * ratio;
        let clipped = -advantage * ratio.clamp(low, high);
        // d(-A ratio)/d log_prob = -A ratio scale; the clipped branch is flat, and equal to the other inside the range
        let slope = if unclipped >= clipped { unclipped * scale } else { 0.0 };
        LossTerm {
            loss: weight * unclipped.max(clipped),
            grad_log_prob: weight * slope,
            ratio,
            clipped: (ratio - 1.0).abs() > self.clip_range,
        }
    }

    /// The KL penalty of one sample, `beta kl`, from [`Transition::kl`]; its derivative by `kl` is `beta`.
    pub fn kl_term(&self, kl: f64) -> f64 {
        self.kl_beta * kl
    }
}
