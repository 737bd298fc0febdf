//! The sigma grid of a rollout: which noise levels are visited, and what the network is told at each.

use serde::{Deserialize, Serialize};

use crate::Error;

/// Training timesteps of the reference schedulers; `timestep = 1000 sigma`.
const NUM_TRAIN_TIMESTEPS: f64 = 1000.0;

/// Which scheduler of diffusers lays out the grid.
///
/// All of them apply the shift `f(u) = shift u / (1 + (shift - 1) u)` and append the final 0.
/// The two `unipc` grids differ in every entry, so a model's rollout and its evaluation must name the same one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum SigmaGrid {
    /// `UniPCMultistepScheduler` with flow sigmas, diffusers <= 0.36, and the original Wan code: sigma_0 is `f(0.999)`.
    /// The paper's rectification table belongs to this grid.
    #[default]
    #[serde(rename = "unipc")]
    Unipc,
    /// The same scheduler since diffusers 0.37: sigma_0 is `1 - 1e-6`.
    #[serde(rename = "unipc-0.37")]
    Unipc037,
    /// `FlowMatchEulerDiscreteScheduler`'s own grid: sigma_0 is 1, the shift is applied twice at the low end.
    #[serde(rename = "euler")]
    Euler,
}

impl SigmaGrid {
    /// The `N` unshifted-then-shifted sigmas without the final 0, exact in f64 (before the f32 table rounds them).
    fn values(self, n: usize, shift: f64) -> Vec<f64> {
        let f = |u: f64| shift * u / (1.0 + (shift - 1.0) * u);
        let lowest = 1.0 / NUM_TRAIN_TIMESTEPS;
        match self {
            SigmaGrid::Unipc => {
                let alphas = linspace(1.0, lowest, n + 1);
                alphas[1..].iter().rev().map(|alpha| f(1.0 - alpha)).collect()
            }
            SigmaGrid::Unipc037 => {
                let mut sigmas: Vec<f64> = linspace(1.0, lowest, n + 1)[..n].iter().map(|&u| f(u)).collect();
                sigmas[0] -= 1e-6;
                sigmas
            }
            SigmaGrid::Euler => {
                // The constructor shifts sigma_min in f32, set_timesteps shifts the whole line again (wan.md).
                let shift32 = shift as f32;
                let sigma_min = shift32 * 0.001 / (1.0 + (shift32 - 1.0) * 0.001);
                let line = linspace(NUM_TRAIN_TIMESTEPS, f64::from(sigma_min) * NUM_TRAIN_TIMESTEPS, n);
                line.iter().map(|timestep| f(timestep / NUM_TRAIN_TIMESTEPS)).collect()
            }
        }
    }

    /// What the network is told at an (unrounded) sigma: truncated for the unipc grids, an f32 product for Euler.
    fn timestep(self, sigma: f64) -> f64 {
        match self {
            SigmaGrid::Unipc | SigmaGrid::Unipc037 => (sigma * NUM_TRAIN_TIMESTEPS).trunc(),
            SigmaGrid::Euler => f64::from(sigma as f32 * NUM_TRAIN_TIMESTEPS as f32),
        }
    }
}

/// A strictly decreasing list of sigmas that ends at 0: `N` steps, `N + 1` values.
///
/// Invariant: the list is decreasing, ends at 0, starts at most at 1 and has at least one step; it cannot be built otherwise.
///
/// **Precision.** diffusers keeps its table in f32 and computes from it. The values here are that table widened to f64, so
/// a schedule that went through a file of f32 sigmas comes back equal, bit for bit, and with it every coefficient.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    grid: SigmaGrid,
    sigmas: Vec<f64>,
    timesteps: Vec<f64>,
}

impl Schedule {
    /// The grid of `num_inference_steps` steps, shifted by `shift` (Wan 480p: 3, 720p: 5; 1 is no shift).
    ///
    /// # Errors
    /// No steps, more than 1000, or a shift that is not a positive number.
    pub fn new(grid: SigmaGrid, num_inference_steps: usize, shift: f64) -> Result<Schedule, Error> {
        if !(1..=1000).contains(&num_inference_steps) {
            let hint = "20 for training and 50 for evaluation are the published values";
            return Err(Error::out_of_range("num_inference_steps", num_inference_steps, "1 to 1000", hint));
        }
        if !(shift.is_finite() && shift > 0.0) {
            let hint = "Wan uses 3 for 480p and 5 for 720p; 1 means no shift";
            return Err(Error::out_of_range("shift", shift, "a positive number", hint));
        }
        let exact = grid.values(num_inference_steps, shift);
        let timesteps = exact.iter().map(|&sigma| grid.timestep(sigma)).collect();
        let sigmas: Vec<f64> = exact.into_iter().chain([0.0]).map(through_f32).collect();
        check(&sigmas)?;
        Ok(Schedule { grid, sigmas, timesteps })
    }

    /// A schedule from a recorded table (`N + 1` values, the last one 0).
    ///
    /// The table has been through f32, so a whole timestep may sit 3e-5 below its value; 5e-5 is added before truncating.
    /// Where the reference itself lands on either side of a whole number by chance of rounding (`unipc`, 6 steps, shift 1:
    /// 332 for 0.333), the timestep can differ by one from [`Schedule::new`]; the sigmas never do.
    ///
    /// # Errors
    /// Fewer than two values, a value outside [0, 1], not strictly decreasing, or not ending at 0.
    pub fn from_sigmas(grid: SigmaGrid, sigmas: Vec<f64>) -> Result<Schedule, Error> {
        let sigmas: Vec<f64> = sigmas.into_iter().map(through_f32).collect();
        check(&sigmas)?;
        let margin = if grid == SigmaGrid::Euler { 0.0 } else { 5e-5 / NUM_TRAIN_TIMESTEPS };
        let timesteps = sigmas[..sigmas.len() - 1].iter().map(|sigma| grid.timestep(sigma + margin)).collect();
        Ok(Schedule { grid, sigmas, timesteps })
    }

    /// The steps from `from` on in `num_steps` larger ones, which start at grid points of this schedule:
    ///
    /// ```text
    /// start_j = from + round(j (N - from) / num_steps),    j = 0 .. num_steps - 1
    /// ```
    ///
    /// # Panics
    /// If `from` is not a step, or `num_steps` is 0 or more than are left.
    pub fn thinned(&self, from: usize, num_steps: usize) -> Schedule {
        let left = self.num_steps() - from;
        assert!((1..=left).contains(&num_steps), "{num_steps} of {left} steps");
        let starts: Vec<usize> = (0..num_steps).map(|j| from + (2 * j * left + num_steps) / (2 * num_steps)).collect();
        Schedule {
            grid: self.grid,
            sigmas: starts.iter().map(|&start| self.sigmas[start]).chain([0.0]).collect(),
            timesteps: starts.iter().map(|&start| self.timesteps[start]).collect(),
        }
    }

    /// The grid this schedule was laid out by.
    pub fn grid(&self) -> SigmaGrid {
        self.grid
    }

    /// Number of denoising steps, `N`.
    pub fn num_steps(&self) -> usize {
        self.timesteps.len()
    }

    /// All `N + 1` sigmas, the last one 0.
    pub fn sigmas(&self) -> &[f64] {
        &self.sigmas
    }

    /// `sigma` at which `step` starts.
    ///
    /// # Panics
    /// If `step` is not below [`num_steps`](Schedule::num_steps), like every method below.
    pub fn sigma(&self, step: usize) -> f64 {
        assert!(step < self.num_steps(), "step {step} of a schedule of {} steps", self.num_steps());
        self.sigmas[step]
    }

    /// `sigma'` at which `step` ends.
    pub fn sigma_next(&self, step: usize) -> f64 {
        assert!(step < self.num_steps(), "step {step} of a schedule of {} steps", self.num_steps());
        self.sigmas[step + 1]
    }

    /// What the network is called with: `int(1000 sigma)` on the unipc grids, `1000 sigma` on Euler's.
    pub fn timestep(&self, step: usize) -> f64 {
        self.timesteps[step]
    }

    /// `sigma' - sigma`, negative.
    pub fn dt(&self, step: usize) -> f64 {
        self.sigma_next(step) - self.sigma(step)
    }
}

/// `num` values from `start` to `stop` inclusive, in numpy's order of operations: truncation to integer timesteps sees the
/// last bit.
fn linspace(start: f64, stop: f64, num: usize) -> Vec<f64> {
    if num == 1 {
        return vec![start];
    }
    let step = (stop - start) / (num - 1) as f64;
    let mut values: Vec<f64> = (0..num).map(|i| i as f64 * step + start).collect();
    values[num - 1] = stop;
    values
}

fn through_f32(value: f64) -> f64 {
    f64::from(value as f32)
}

fn check(sigmas: &[f64]) -> Result<(), Error> {
    if sigmas.len() < 2 {
        return Err(Error::out_of_range("sigmas", sigmas.len(), "at least two values", "one step needs a start and an end"));
    }
    for (index, &got) in sigmas.iter().enumerate() {
        if !(0.0..=1.0).contains(&got) {
            return Err(Error::Sigmas { index, got, expected: "a value between 0 and 1" });
        }
        if index > 0 && got >= sigmas[index - 1] {
            return Err(Error::Sigmas { index, got, expected: "less than the sigma before it" });
        }
    }
    let last = sigmas.len() - 1;
    if sigmas[last] != 0.0 {
        return Err(Error::Sigmas { index: last, got: sigmas[last], expected: "0 at the end" });
    }
    Ok(())
}
