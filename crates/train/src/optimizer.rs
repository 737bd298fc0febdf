//! AdamW, gradient clipping and moving averages over a flat [`ParamSet`], as PyTorch defines them.

use burn::tensor::{Gradients, Tensor};
use serde::{Deserialize, Serialize};
use wan::param::ParamSet;
use wan::weights::to_floats;

/// Settings of [`AdamW`] (`[optimizer]`); names and defaults as in PyTorch, published values where those differ.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdamWConfig {
    /// Step size.
    pub learning_rate: f64,
    /// Decay rates of the first and second moments.
    pub betas: [f64; 2],
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Largest global norm of the gradient; longer ones are scaled down to it.
    pub max_grad_norm: f64,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        Self { learning_rate: 1e-4, betas: [0.9, 0.999], weight_decay: 1e-4, epsilon: 1e-8, max_grad_norm: 1.0 }
    }
}

/// The optimizer's state: two moments per trainable weight, in the order of the set.
#[derive(Debug, Clone)]
pub struct AdamW {
    /// Settings.
    pub config: AdamWConfig,
    /// Updates made so far.
    pub updates: u64,
    /// First and second moment per weight.
    pub moments: Vec<[Tensor<1>; 2]>,
    /// How many of the updates had a gradient of each weight. (An update in which no sample takes a step of one of two networks has none.)
    pub counts: Vec<u64>,
}

impl AdamW {
    /// Zero moments for every weight of `params`.
    pub fn new(config: AdamWConfig, params: &ParamSet) -> Self {
        let zeros = |value: Tensor<1>| [value.zeros_like(), value.zeros_like()];
        Self { config, updates: 0, moments: params.iter().map(|slot| zeros(slot.value())).collect(), counts: vec![0; params.len()] }
    }

    /// One update with the configured learning rate.
    pub fn step(&mut self, params: &ParamSet, gradients: &GradientSum) {
        self.step_with(params, gradients, self.config.learning_rate);
    }

    /// One update (Loshchilov & Hutter 2019, the order of operations of PyTorch):
    ///
    /// ```text
    /// p <- p (1 - lr wd)
    /// m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2
    /// p <- p - lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)
    /// ```
    ///
    /// t counts the gradients of this weight: without one it stays as it is, and so do its moments.
    ///
    /// # Panics
    /// If `params` or `gradients` are of another set than the one the optimizer was made for.
    pub fn step_with(&mut self, params: &ParamSet, gradients: &GradientSum, learning_rate: f64) {
        assert_eq!(params.len(), self.moments.len(), "weights of another set");
        assert_eq!(params.len(), gradients.sums.len(), "gradients of another set");
        self.updates += 1;
        let [b1, b2] = self.config.betas;
        for (((slot, moments), count), gradient) in params.iter().zip(&mut self.moments).zip(&mut self.counts).zip(&gradients.sums) {
            let Some(g) = gradient else { continue };
            *count += 1;
            let t = *count as f64;
            let (correction_1, correction_2) = (1.0 - b1.powf(t), 1.0 - b2.powf(t));
            let [m, v] = moments.clone();
            let m = m.mul_scalar(b1) + g.clone().mul_scalar(1.0 - b1);
            let v = v.mul_scalar(b2) + g.clone().powi_scalar(2).mul_scalar(1.0 - b2);
            let denominator = v.clone().sqrt().div_scalar(correction_2.sqrt()).add_scalar(self.config.epsilon);
            let decayed = slot.value().mul_scalar(1.0 - learning_rate * self.config.weight_decay);
            slot.set_value(decayed - (m.clone() / denominator).mul_scalar(learning_rate / correction_1));
            *moments = [m, v];
        }
    }
}

/// Gradients summed over backward passes, one per weight; `None` where no gradient arrived.
#[derive(Debug, Clone)]
pub struct GradientSum {
    /// In the order of the set.
    pub sums: Vec<Option<Tensor<1>>>,
}

impl GradientSum {
    /// Nothing summed yet.
    pub fn new(params: &ParamSet) -> Self {
        Self { sums: vec![None; params.len()] }
    }

    /// Adds the gradients of one backward pass.
    pub fn add(&mut self, params: &ParamSet, gradients: &Gradients) {
        for (slot, sum) in params.iter().zip(&mut self.sums) {
            add(sum, slot.leaf().grad(gradients));
        }
    }

    /// Adds another sum.
    ///
    /// # Panics
    /// If it is of another set.
    pub fn merge(&mut self, other: Self) {
        assert_eq!(self.sums.len(), other.sums.len(), "gradients of another set");
        for (sum, gradient) in self.sums.iter_mut().zip(other.sums) {
            add(sum, gradient);
        }
    }

    /// Mean over ranks, each of which holds the gradient of the mean over its own samples.
    pub fn all_reduce(&mut self, collective: &dyn crate::collective::Collective) {
        let mut present: Vec<Tensor<1>> = self.sums.iter().flatten().cloned().collect();
        collective.all_reduce_sum(&mut present);
        for (sum, reduced) in self.sums.iter_mut().filter(|sum| sum.is_some()).zip(present) {
            *sum = Some(reduced.div_scalar(collective.world_size() as f64));
        }
    }

    /// Euclidean norm over all weights together.
    pub fn norm(&self) -> f64 {
        let square = |g: &Tensor<1>| f64::from(to_floats(g.clone().powi_scalar(2).sum())[0]);
        self.sums.iter().flatten().map(square).sum::<f64>().sqrt()
    }

    /// Scales to norm at most `max_norm`, as `clip_grad_norm_` does; returns the norm before.
    pub fn clip(&mut self, max_norm: f64) -> f64 {
        let norm = self.norm();
        let scale = max_norm / (norm + 1e-6);
        if scale < 1.0 {
            for sum in self.sums.iter_mut().flatten() {
                *sum = sum.clone().mul_scalar(scale);
            }
        }
        norm
    }
}

fn add(sum: &mut Option<Tensor<1>>, gradient: Option<Tensor<1>>) {
    if let Some(gradient) = gradient {
        *sum = Some(match sum.take() {
            None => gradient,
            Some(sum) => sum + gradient,
        });
    }
}

/// Exponential moving average of weights.
#[derive(Debug, Clone)]
pub struct Ema {
    /// Largest decay.
    pub decay: f64,
    /// Averages taken so far.
    pub updates: u64,
    /// The averages, in the order of the set.
    pub values: Vec<Tensor<1>>,
}

impl Ema {
    /// Starts at the current values.
    pub fn new(decay: f64, params: &ParamSet) -> Self {
        Self { decay, updates: 0, values: params.snapshot() }
    }

    /// `e <- d e + (1 - d) p` with the warm-up `d = min(decay, (1 + n) / (10 + n))` at the n-th update.
    pub fn update(&mut self, params: &ParamSet) {
        self.updates += 1;
        let n = self.updates as f64;
        let decay = self.decay.min((1.0 + n) / (10.0 + n));
        for (average, slot) in self.values.iter_mut().zip(params.iter()) {
            *average = average.clone().mul_scalar(decay) + slot.value().mul_scalar(1.0 - decay);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::Device;
    use wan::param::Slot;

    #[test]
    fn the_average_follows_its_formula() {
        let constant = |value: f32| Tensor::<1>::from_data([value, 2.0 * value].as_slice(), &Device::flex());
        let slot = Slot::new("w".into(), vec![2], constant(1.0));
        let params = ParamSet::new(vec![slot.clone()]);
        let mut ema = Ema::new(0.3, &params);
        let mut expected = 1.0;
        for n in 1..=6 {
            slot.set_value(constant(n as f32));
            ema.update(&params);
            // the warm-up (1 + n)/(10 + n) stays below 0.3 for two updates
            let decay = f64::min(0.3, (1.0 + f64::from(n)) / (10.0 + f64::from(n)));
            expected = decay * expected + (1.0 - decay) * f64::from(n);
            let average = to_floats(ema.values[0].clone());
            assert!((f64::from(average[0]) - expected).abs() < 1e-6 && (average[1] - 2.0 * average[0]).abs() < 1e-6, "{n}: {average:?}");
        }
        assert_eq!(ema.updates, 6);
    }
}
