//! The solvers against the reference's trajectories of a Gaussian, and their orders of convergence.

mod common;

use burn::tensor::{Tensor, TensorData};
use common::Golden;
use common::device::{allowed, device};
use grpo::{Schedule, SigmaGrid};
use wan::solver::{Solver, SolverKind};
use wan::weights::to_floats;

/// Largest absolute difference to the reference's trajectories (golden/README.md).
const TRAJECTORY: f64 = 5e-6;

/// Data distribution N(MEAN, STD^2): its velocity is known in closed form.
const MEAN: f64 = 0.7;
const STD: f64 = 0.5;

/// ```text
/// d = x - (1 - sigma) m,   var = (1 - sigma)^2 s^2 + sigma^2
/// v = sigma/var d - (m + (1 - sigma) s^2/var d)
/// ```
fn gaussian_velocity(x: &Tensor<5>, sigma: f64) -> Tensor<5> {
    let var = (1.0 - sigma).powi(2) * STD * STD + sigma * sigma;
    let deviation = x.clone().sub_scalar((1.0 - sigma) * MEAN);
    deviation.mul_scalar((sigma - (1.0 - sigma) * STD * STD) / var).sub_scalar(MEAN)
}

/// The trajectory from `x0`, `N + 1` points; `velocity(step, x)` is asked at each.
fn trajectory(kind: SolverKind, schedule: &Schedule, x0: Tensor<5>, velocity: impl Fn(usize, &Tensor<5>) -> Tensor<5>) -> Vec<f32> {
    let mut solver = Solver::new(kind, schedule.clone());
    let mut latents = x0;
    let mut points = to_floats(latents.clone());
    for step in 0..schedule.num_steps() {
        latents = solver.step(step, velocity(step, &latents), latents);
        points.extend(to_floats(latents.clone()));
    }
    points
}

fn recorded_schedule(golden: &Golden, grid: SigmaGrid, name: &str) -> Schedule {
    let sigmas = golden.values(&format!("{name}.sigmas")).into_iter().map(f64::from).collect();
    Schedule::from_sigmas(grid, sigmas).expect("recorded sigmas")
}

#[track_caller]
fn assert_near(what: &str, ours: &[f32], reference: &[f32], tolerance: f64) {
    assert_eq!(ours.len(), reference.len(), "{what}");
    let differences = ours.iter().zip(reference).map(|(a, b)| f64::from((a - b).abs()));
    let worst = differences.fold(0.0, |worst: f64, d| if d.is_nan() { f64::INFINITY } else { worst.max(d) });
    let tolerance = allowed(tolerance);
    assert!(worst <= tolerance, "{what}: off by {worst:e} > {tolerance:e}");
}

#[test]
fn matches_reference_unipc_trajectory() {
    let golden = Golden::open("scheduler_trajectories");
    for steps in [4, 8, 20] {
        let name = format!("unipc.n{steps}");
        let schedule = recorded_schedule(&golden, SigmaGrid::Unipc037, &name);
        let laid_out = Schedule::new(SigmaGrid::Unipc037, steps, 3.0).expect("schedule");
        assert_eq!(schedule.sigmas(), laid_out.sigmas());
        let points = trajectory(SolverKind::Unipc, &schedule, golden.tensor("x0"), |step, x| gaussian_velocity(x, schedule.sigma(step)));
        assert_near(&name, &points, &golden.values(&format!("{name}.trajectory")), TRAJECTORY);
        let exact = golden.values(&format!("{name}.own_float64_trajectory"));
        assert_near(&format!("{name} in float64"), &points, &exact, TRAJECTORY);
    }
}

#[test]
fn matches_reference_unipc_on_recorded_velocities() {
    let golden = Golden::open("scheduler_trajectories");
    for steps in [4, 8, 20] {
        let name = format!("unipc.n{steps}");
        let schedule = recorded_schedule(&golden, SigmaGrid::Unipc037, &name);
        let velocities: Tensor<6> = golden.tensor(&format!("{name}.velocity"));
        let recorded = |step: usize, _: &Tensor<5>| velocities.clone().narrow(0, step, 1).squeeze_dim::<5>(0);
        let points = trajectory(SolverKind::Unipc, &schedule, golden.tensor("x0"), recorded);
        assert_near(&name, &points, &golden.values(&format!("{name}.trajectory")), TRAJECTORY);
    }
}

#[test]
fn matches_reference_euler_trajectory() {
    let golden = Golden::open("scheduler_trajectories");
    for steps in [4, 8, 20] {
        let name = format!("euler.n{steps}");
        let schedule = recorded_schedule(&golden, SigmaGrid::Euler, &name);
        let points = trajectory(SolverKind::Euler, &schedule, golden.tensor("x0"), |step, x| gaussian_velocity(x, schedule.sigma(step)));
        assert_near(&name, &points, &golden.values(&format!("{name}.trajectory")), TRAJECTORY);
    }
}

/// Largest error at sigma = 0 against the exact flow of the Gaussian, x = (1 - sigma) m + sqrt(var) z with constant z.
fn final_error(kind: SolverKind, steps: usize) -> f64 {
    let schedule = Schedule::new(SigmaGrid::Unipc, steps, 3.0).expect("schedule");
    let start: Vec<f32> = (0..8).map(|i| i as f32 * 0.5 - 2.0).collect();
    let x0 = Tensor::from_data(TensorData::new(start.clone(), [1, 1, 2, 2, 2]), &device());
    let points = trajectory(kind, &schedule, x0, |step, x| gaussian_velocity(x, schedule.sigma(step)));
    let sigma = schedule.sigma(0);
    let deviation = ((1.0 - sigma).powi(2) * STD * STD + sigma * sigma).sqrt();
    let exact = start.iter().map(|&x| MEAN + STD * (f64::from(x) - (1.0 - sigma) * MEAN) / deviation);
    points[points.len() - 8..].iter().zip(exact).map(|(x, exact)| (f64::from(*x) - exact).abs()).fold(0.0, f64::max)
}

#[test]
fn errors_fall_with_the_order_of_the_solver() {
    for (kind, order) in [(SolverKind::Euler, 1.0), (SolverKind::Unipc, 2.0)] {
        let (coarse, fine) = (final_error(kind, 320), final_error(kind, 640));
        let measured = (coarse / fine).log2();
        assert!((measured - order).abs() < 0.1, "{kind:?}: errors {coarse:e}, {fine:e}, order {measured}");
    }
    // what the order buys at the usual number of steps
    assert!(final_error(SolverKind::Unipc, 20) < 0.25 * final_error(SolverKind::Euler, 20));
}

#[test]
fn unipc_copes_with_infinite_log_snr() {
    // sigma = 1 (log-SNR minus infinity) and few steps, on every grid
    for grid in [SigmaGrid::Unipc, SigmaGrid::Unipc037, SigmaGrid::Euler] {
        for steps in 1..=4 {
            let schedule = Schedule::new(grid, steps, 3.0).expect("schedule");
            let x0 = Tensor::from_data(TensorData::new(vec![1.5_f32], [1, 1, 1, 1, 1]), &device());
            let points = trajectory(SolverKind::Unipc, &schedule, x0, |step, x| gaussian_velocity(x, schedule.sigma(step)));
            assert!(points.iter().all(|x| x.is_finite()), "{grid:?}, {steps} steps: {points:?}");
        }
    }
}
