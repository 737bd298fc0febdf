//! What each denoising step contributed to an iteration's updates.

use grpo::{LossTerm, Transition};
use serde::Serialize;

/// Means over the transitions of one step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct StepMetrics {
    /// Transitions that were backpropagated.
    pub transitions: usize,
    /// Weight of the loss, `w`.
    pub weight: f64,
    /// How hard the loss pulls at the velocity, see [`velocity_gradient`].
    pub gradient: f64,
    /// Share of ratios outside the clip range.
    pub clip_fraction: f64,
}

/// The norm of the loss's gradient at the velocity, before it enters the network, in units of one element:
///
/// ```text
/// sqrt(D) |d loss/d v|_2 = |d loss/d log_prob| |d log_prob/d ms| 2 |b| sqrt(ms)
///                        = w |A| lambda sqrt(mean eps^2)                             on policy
/// ```
///
/// `lambda` is what temporal gradient rectification divides by (Flash-GRPO section 3.3): with `rectified` weights this is equal at all steps up to
/// the advantages. The drift of a normalised ratio is not in it.
pub fn velocity_gradient(term: &LossTerm, transition: &Transition, mean_square_residual: f64) -> f64 {
    (term.grad_log_prob * transition.log_prob_slope() * 2.0 * transition.velocity_coef).abs() * mean_square_residual.max(0.0).sqrt()
}

impl StepMetrics {
    /// One transition.
    pub fn of(weight: f64, gradient: f64, clipped: bool) -> Self {
        Self { transitions: 1, weight, gradient, clip_fraction: f64::from(u8::from(clipped)) }
    }

    /// Takes in others of the same step.
    pub fn merge(&mut self, other: &Self) {
        let transitions = self.transitions + other.transitions;
        if transitions == 0 {
            return;
        }
        let share = other.transitions as f64 / transitions as f64;
        let blend = |mean: &mut f64, other: f64| *mean += share * (other - *mean);
        blend(&mut self.weight, other.weight);
        blend(&mut self.gradient, other.gradient);
        blend(&mut self.clip_fraction, other.clip_fraction);
        self.transitions = transitions;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use grpo::{LossWeight, LossWeights, NoiseLevel, PolicyLoss, Recipe, Schedule, SigmaGrid, StepChange};

    #[test]
    fn merging_is_the_mean_over_transitions() {
        let mut all = StepMetrics::default();
        for (weight, gradient, clipped) in [(1.0, 2.0, true), (1.0, 4.0, false), (1.0, 9.0, false), (1.0, 1.0, false)] {
            all.merge(&StepMetrics::of(weight, gradient, clipped));
        }
        assert_eq!(all, StepMetrics { transitions: 4, weight: 1.0, gradient: 4.0, clip_fraction: 0.25 });
    }

    /// The formula against a difference quotient: one element, v moved.
    #[test]
    fn it_is_the_derivative_by_the_velocity() {
        let schedule = Schedule::new(SigmaGrid::Unipc, 10, 3.0).expect("a schedule");
        let transition = Transition::stochastic(&schedule, &NoiseLevel::Linear { eta: 1.0 }, 4);
        let (x, v, next) = (0.3, -0.7, 0.11);
        let square = |v: f64| (next - transition.mean(x, v)).powi(2);
        let old = transition.log_prob(square(v));
        let loss = PolicyLoss::new(0.5, 0.0).expect("valid");
        let at = |v: f64| loss.term(transition.log_prob(square(v)), old, 1.3, 0.8, StepChange::new(&transition, 0.0));
        let numeric = (at(v + 1e-6).loss - at(v - 1e-6).loss) / 2e-6;
        let formula = velocity_gradient(&at(v), &transition, square(v));
        assert!((formula - numeric.abs()).abs() < 1e-6 * formula, "{formula} {numeric}");
    }

    /// Rectified weights make the pull the same at every step of the pool.
    #[test]
    fn rectification_flattens_it() {
        let schedule = Schedule::new(SigmaGrid::Unipc, 20, 3.0).expect("a schedule");
        let pull = |weight: LossWeight| -> Vec<f64> {
            let recipe = Recipe { loss_weight: weight, ..Recipe::named("flash-grpo").expect("known") };
            let weights = LossWeights::new(&recipe, &schedule).expect("weights");
            let loss = PolicyLoss::new(1e-3, 0.0).expect("valid");
            let of = |step: usize| {
                let transition = Transition::stochastic(&schedule, &recipe.noise_level, step);
                let square = transition.std * transition.std; // eps of power 1
                let log_prob = transition.log_prob(square);
                let term = loss.term(log_prob, log_prob, 1.0, weights.weight(step), StepChange::new(&transition, 0.0));
                velocity_gradient(&term, &transition, square)
            };
            (0..10).map(of).collect()
        };
        let spread = |values: Vec<f64>| values.iter().copied().fold(f64::MIN, f64::max) / values.iter().copied().fold(f64::MAX, f64::min);
        assert!(spread(pull(LossWeight::Rectified)) < 1.0 + 1e-9);
        assert!(spread(pull(LossWeight::Uniform)) > 1.5);
    }
}
