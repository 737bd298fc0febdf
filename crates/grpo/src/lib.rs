//! The paper as a library: GRPO for flow-matching models, in scalars.
//!
//! Flash-GRPO (ICML 2026, arXiv 2605.15980) and its relatives are values of one small set of choices, a [`Recipe`].
//! Nothing here touches a model, a file or a thread; every number is an f64 on the CPU.
//!
//! Read in this order:
//!
//! 1. [`Schedule`]: the sigma grid, from noise (1) to data (0).
//! 2. [`NoiseLevel`] and [`Transition`]: one denoising step is one affine Gaussian, `mean = a x + b v`, `std`.
//! 3. [`Recipe`] and [`StepPlan`]: which steps are random, which are trained, and who shares that choice.
//! 4. [`GroupLayout`] and [`advantages`]: from rewards to signals.
//! 5. [`LossWeights`] and [`PolicyLoss`]: from log-probabilities to the loss and its gradient.
//!
//! Notation: `sigma` is the noise share of `x = (1 - sigma) x0 + sigma x1`, `v = x1 - x0` the velocity, `h = sigma - sigma'`
//! the (positive) step length, `s` the noise level, `D` the number of elements of one sample.
//!
//! ```
//! use grpo::{LossWeights, Recipe, Schedule, SigmaGrid};
//! let schedule = Schedule::new(SigmaGrid::Unipc, 20, 3.0)?;
//! let recipe = Recipe::named("flash-grpo").ok_or("no such method")?;
//! let plan = recipe.plan(1, 0, 3, 7, schedule.num_steps());
//! assert_eq!(plan.stochastic.len(), 1);
//! assert!(LossWeights::new(&recipe, &schedule)?.weight(plan.trained[0]) > 0.0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod advantage;
mod error;
mod group;
mod loss;
mod loss_weight;
mod noise_level;
pub mod random;
mod recipe;
mod schedule;
mod step_plan;
mod transition;

pub use advantage::{AdvantageScale, advantages};
pub use error::Error;
pub use group::GroupLayout;
pub use loss::{LossTerm, PolicyLoss, RatioKind, StepChange};
pub use loss_weight::{LossWeight, LossWeights};
pub use noise_level::NoiseLevel;
pub use random::{Key, Purpose};
pub use recipe::{Decay, InitialNoise, Recipe, StepSharing, StochasticSteps, TrainedSteps};
pub use schedule::{Schedule, SigmaGrid};
pub use step_plan::StepPlan;
pub use transition::{Density, Transition};
