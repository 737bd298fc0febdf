//! Deterministic solvers of the flow ODE dx/dsigma = v(x, sigma).

use burn::tensor::Tensor;
use grpo::{Schedule, Transition};
use serde::{Deserialize, Serialize};

/// Which solver takes the deterministic steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SolverKind {
    /// x' = x + (sigma' - sigma) v: what training rollouts use.
    #[default]
    Euler,
    /// UniPC of order 2, what the Wan pipeline samples with.
    Unipc,
}

/// A solver under way; it sees every step of one trajectory in order.
#[derive(Debug, Clone)]
pub struct Solver {
    kind: SolverKind,
    schedule: Schedule,
    history: Vec<Point>,
    /// The sample the last prediction started from, after its correction.
    last: Option<Tensor<5>>,
}

/// The data prediction made at a grid point.
#[derive(Debug, Clone)]
struct Point {
    step: usize,
    data: Tensor<5>,
}

impl Solver {
    /// A solver at the start of `schedule`.
    pub fn new(kind: SolverKind, schedule: Schedule) -> Self {
        Self { kind, schedule, history: Vec::new(), last: None }
    }

    /// From x at `step` and v(x) to x at the next grid point. Tensors [B, C, F, H, W].
    pub fn step(&mut self, step: usize, velocity: Tensor<5>, latents: Tensor<5>) -> Tensor<5> {
        match self.kind {
            SolverKind::Euler => euler(&self.schedule, step, velocity, latents),
            SolverKind::Unipc => self.unipc(step, velocity, latents),
        }
    }

    /// UniPC-2 with B(h) = e^h - 1 on data predictions (Zhao et al. 2023): correct x with the new prediction, then predict.
    fn unipc(&mut self, step: usize, velocity: Tensor<5>, latents: Tensor<5>) -> Tensor<5> {
        let data = latents.clone() - velocity.mul_scalar(self.schedule.sigma(step));
        let corrected = match self.last.take() {
            Some(last) => self.correct(step, last, data.clone()),
            None => latents,
        };
        self.history.push(Point { step, data });
        if self.history.len() > 2 {
            self.history.remove(0);
        }
        self.last = Some(corrected.clone());
        // the last step is of first order: sigma' = 0 has no finite log signal-to-noise ratio
        let order = self.history.len().min(self.schedule.num_steps() - step);
        self.predict(step, corrected, order)
    }

    fn predict(&self, step: usize, x: Tensor<5>, order: usize) -> Tensor<5> {
        let interval = self.interval(step, step + 1);
        let newest = self.history.len() - 1;
        let data = self.history[newest].data.clone();
        let mut next = interval.first_order(x, data.clone());
        if order == 2 {
            let slope = self.slope(newest, &interval);
            next = next - slope.mul_scalar(interval.alpha * interval.b * 0.5);
        }
        next
    }

    /// Replaces the prediction of the current point by one that knows `data`, the prediction made there.
    fn correct(&self, step: usize, last: Tensor<5>, data: Tensor<5>) -> Tensor<5> {
        let newest = self.history.len() - 1;
        let from = self.history[newest].step;
        let interval = self.interval(from, step);
        let base = self.history[newest].data.clone();
        let mut next = interval.first_order(last, base.clone());
        let change = data - base;
        let mut change_weight = 0.5;
        if newest > 0 {
            let slope_weight;
            (slope_weight, change_weight) = interval.corrector_weights(self.log_snr_ratio(newest, &interval));
            let slope = self.slope(newest, &interval);
            next = next - slope.mul_scalar(interval.alpha * interval.b * slope_weight);
        }
        next - change.mul_scalar(interval.alpha * interval.b * change_weight)
    }

    /// r = (lambda_previous - lambda_from) / h
    fn log_snr_ratio(&self, newest: usize, interval: &Interval) -> f64 {
        (log_snr(self.schedule.sigma(self.history[newest - 1].step)) - interval.lambda_from) / interval.h
    }

    /// D1 = (data_previous - data_from) / r
    fn slope(&self, newest: usize, interval: &Interval) -> Tensor<5> {
        let ratio = self.log_snr_ratio(newest, interval);
        (self.history[newest - 1].data.clone() - self.history[newest].data.clone()).div_scalar(ratio)
    }

    fn interval(&self, from: usize, to: usize) -> Interval {
        let (sigma_from, sigma_to) = (self.schedule.sigma(from), self.schedule.sigmas()[to]);
        let (lambda_from, lambda_to) = (log_snr(sigma_from), log_snr(sigma_to));
        let h = lambda_to - lambda_from;
        Interval { alpha: 1.0 - sigma_to, noise_ratio: sigma_to / sigma_from, lambda_from, h, b: (-h).exp_m1() }
    }
}

/// One Euler step; also the deterministic step of a training rollout.
pub fn euler(schedule: &Schedule, step: usize, velocity: Tensor<5>, latents: Tensor<5>) -> Tensor<5> {
    let ode = Transition::ode(schedule, step);
    latents.mul_scalar(ode.latents_coef) + velocity.mul_scalar(ode.velocity_coef)
}

/// lambda = ln((1 - sigma) / sigma)
fn log_snr(sigma: f64) -> f64 {
    (1.0 - sigma).ln() - sigma.ln()
}

/// Scalars of the step between two grid points.
struct Interval {
    /// 1 - sigma'
    alpha: f64,
    /// sigma' / sigma
    noise_ratio: f64,
    lambda_from: f64,
    /// lambda' - lambda, infinite at sigma' = 0
    h: f64,
    /// B = e^(-h) - 1
    b: f64,
}

impl Interval {
    /// sigma'/sigma x - alpha' (e^(-h) - 1) data
    fn first_order(&self, x: Tensor<5>, data: Tensor<5>) -> Tensor<5> {
        x.mul_scalar(self.noise_ratio) - data.mul_scalar(self.alpha * self.b)
    }

    /// Solves [[1, 1], [r, 1]] (w_slope, w_change) = (phi_1, 2 phi_2) with phi_1 = B/(-h) - 1, phi_2 = phi_1/(-h) - 1/2, both over B.
    fn corrector_weights(&self, r: f64) -> (f64, f64) {
        let hh = -self.h;
        let phi_1 = self.b / hh - 1.0;
        let phi_2 = phi_1 / hh - 0.5;
        let (b_1, b_2) = (phi_1 / self.b, 2.0 * phi_2 / self.b);
        let slope = (b_2 - b_1) / (r - 1.0);
        (slope, b_1 - slope)
    }
}
