//! Signs that a run goes wrong although every number is finite. They warn, and change nothing.

use crate::iteration::IterationMetrics;
use std::collections::VecDeque;

/// Iterations that are remembered.
const MEMORY: usize = 20;
/// Iterations before a norm is judged.
const ENOUGH: usize = 5;
/// A norm is suspicious at this many times the median.
const JUMP: f64 = 20.0;

/// What the last iterations were like.
#[derive(Debug, Clone, Default)]
pub struct Watchdog {
    norms: VecDeque<f64>,
}

impl Watchdog {
    /// Warnings about an iteration, each with what to do.
    pub fn look(&mut self, metrics: &IterationMetrics, clip_range: f64) -> Vec<String> {
        let mut warnings = Vec::new();
        let iteration = metrics.iteration;
        if metrics.reward_group_std < 1e-9 {
            warnings.push(format!(
                "iteration {iteration}: every group's rewards are all equal, so that nothing can be learnt: more noise (`method.noise_level`), larger groups, or a reward with finer steps"
            ));
        }
        if metrics.ratio_deviation > clip_range {
            warnings.push(format!(
                "iteration {iteration}: the ratio of the first update differs from 1 by {:.1e}, more than `train.clip_range`: rollout and replay disagree; record with `debug.save_rollouts=true` and look with `flash-grpo replay`",
                metrics.ratio_deviation
            ));
        }
        if let Some(median) = self.median().filter(|median| metrics.grad_norm > JUMP * median) {
            warnings.push(format!(
                "iteration {iteration}: the norm of the gradient is {:.3e}, {:.0} times the usual: if it lasts, lower `optimizer.learning_rate`",
                metrics.grad_norm,
                metrics.grad_norm / median
            ));
        }
        if self.norms.len() == MEMORY {
            self.norms.pop_front();
        }
        self.norms.push_back(metrics.grad_norm);
        warnings
    }

    /// The median norm, once enough are known and they are not zero.
    fn median(&self) -> Option<f64> {
        let mut norms: Vec<f64> = self.norms.iter().copied().collect();
        norms.sort_by(f64::total_cmp);
        norms.get(norms.len() / 2).copied().filter(|median| self.norms.len() >= ENOUGH && *median > 0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metrics(reward_group_std: f64, ratio_deviation: f64, grad_norm: f64) -> IterationMetrics {
        IterationMetrics { reward_group_std, ratio_deviation, grad_norm, ..Default::default() }
    }

    #[test]
    fn warns_of_collapse_drift_and_explosion_only() {
        let mut dog = Watchdog::default();
        for _ in 0..30 {
            assert!(dog.look(&metrics(0.1, 0.0, 0.01), 1e-3).is_empty());
        }
        assert!(dog.look(&metrics(0.0, 0.0, 0.01), 1e-3)[0].contains("all equal"));
        assert!(dog.look(&metrics(0.1, 2e-3, 0.01), 1e-3)[0].contains("differs from 1"));
        assert!(dog.look(&metrics(0.1, 0.0, 1.0), 1e-3)[0].contains("100 times"));
        assert!(Watchdog::default().look(&metrics(0.1, 0.0, 1.0), 1e-3).is_empty());
    }
}
