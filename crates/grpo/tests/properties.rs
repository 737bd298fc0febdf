//! What must hold for every grid, noise level, step and recipe.

#![allow(clippy::unwrap_used)]

use grpo::*;
use proptest::prelude::*;

fn grid() -> impl Strategy<Value = SigmaGrid> {
    prop_oneof![Just(SigmaGrid::Unipc), Just(SigmaGrid::Unipc037), Just(SigmaGrid::Euler)]
}

fn noise_level() -> impl Strategy<Value = NoiseLevel> {
    prop_oneof![
        (0.1..2.0).prop_map(|eta| NoiseLevel::Linear { eta }),
        (0.1..1.0).prop_map(|a| NoiseLevel::Flow { a }),
        (0.1..1.0).prop_map(|eta| NoiseLevel::Constant { eta }),
        ((0.1..1.0), any::<bool>())
            .prop_map(|(eta, gaussian)| NoiseLevel::Cps { eta, density: if gaussian { Density::Gaussian } else { Density::Unnormalised } }),
    ]
}

prop_compose! {
    /// A schedule and a step that may be stochastic.
    fn place()(grid in grid(), n in 3usize..60, shift in 1.0..8.0)
        (step in 0..n - 1, schedule in Just(Schedule::new(grid, n, shift).unwrap())) -> (Schedule, usize) {
        (schedule, step)
    }
}

fn close(got: f64, want: f64, tolerance: f64) -> Result<(), TestCaseError> {
    prop_assert!((got - want).abs() <= tolerance * (1.0 + want.abs()), "got {}, want {}", got, want);
    Ok(())
}

proptest! {
    /// Propagate the first two moments of x = (1-sigma) x0 + sigma x1, v = x1 - x0 through mean = a x + b v, then add std^2.
    #[test]
    fn moments_of_a_stochastic_step((schedule, step) in place(), noise_level in noise_level()) {
        let t = Transition::stochastic(&schedule, &noise_level, step);
        let (sigma, next) = (schedule.sigma(step), schedule.sigma_next(step));
        let of_x0 = t.latents_coef * (1.0 - sigma) - t.velocity_coef;
        let of_x1 = t.latents_coef * sigma + t.velocity_coef;
        close(of_x0, 1.0 - next, 1e-9)?; // the mean is the marginal's
        let excess = of_x1 * of_x1 + t.std * t.std - next * next;
        close(excess, Transition::excess_variance(&schedule, &noise_level, step), 1e-9)?;
    }

    #[test]
    fn without_noise_a_step_is_the_ode((schedule, step) in place()) {
        let ode = Transition::ode(&schedule, step);
        for noise_level in [NoiseLevel::Linear { eta: 1e-9 }, NoiseLevel::Flow { a: 1e-9 }, NoiseLevel::Constant { eta: 1e-9 }, NoiseLevel::Cps { eta: 1e-9, density: Density::Gaussian }] {
            let t = Transition::stochastic(&schedule, &noise_level, step);
            close(t.latents_coef, ode.latents_coef, 1e-7)?;
            close(t.velocity_coef, ode.velocity_coef, 1e-7)?;
            close(t.std, 0.0, 1e-7)?;
        }
        prop_assert!(ode.sensitivity().is_infinite());
    }

    /// d log_prob / d v_i = -eps_i lambda / D on policy, by central differences; and the closed form of lambda.
    #[test]
    fn sensitivity_is_the_slope_of_log_prob((schedule, step) in place(), noise_level in noise_level(),
                                            x in -2.0..2.0f64, v in -2.0..2.0f64, eps in -2.0..2.0f64) {
        let t = Transition::stochastic(&schedule, &noise_level, step);
        let next = t.mean(x, v) + t.std * eps;
        let log_prob = |v: f64| t.log_prob((next - t.mean(x, v)).powi(2)); // D = 1
        let d = 1e-5 / t.gradient_scale();
        let slope = (log_prob(v + d) - log_prob(v - d)) / (2.0 * d);
        let sign = -t.velocity_coef.signum(); // b < 0 but for extreme CPS
        close(slope / t.gradient_scale(), -eps * sign, 1e-4)?;
        if !matches!(noise_level, NoiseLevel::Cps { .. }) {
            let (s, sigma, h) = (noise_level.level(&schedule, step), schedule.sigma(step), -schedule.dt(step));
            close(t.sensitivity(), h.sqrt() / s + s * h.sqrt() * (1.0 - sigma) / (2.0 * sigma), 1e-10)?;
        }
        // KL of two Gaussians of equal std
        let dv = 0.3;
        close(t.kl(dv * dv), (t.velocity_coef * dv).powi(2) / (2.0 * t.std * t.std), 1e-10)?;
        // log_prob_slope is d log_prob / d ms
        close(t.log_prob(1.5) - t.log_prob(0.5), t.log_prob_slope(), 1e-9)?;
    }

    /// weight * |d loss / d v| is the same at every step once rectified, for either ratio.
    #[test]
    fn rectified_gradients_are_flat(grid in grid(), n in 3usize..60, shift in 1.0..8.0, noise_level in noise_level(),
                                    pool in 1usize..30, normalised in any::<bool>()) {
        let schedule = Schedule::new(grid, n, shift).unwrap();
        let ratio = if normalised { RatioKind::Normalised } else { RatioKind::Plain };
        let stochastic = StochasticSteps::Random { count: 1, pool: pool.min(n - 1) };
        let recipe = Recipe { stochastic, noise_level, ratio, ..Recipe::flash_grpo() };
        prop_assume!(recipe.validate(n).is_ok()); // a normalised ratio needs a normalised density
        let weights = LossWeights::new(&recipe, &schedule).unwrap();
        let loss = PolicyLoss { ratio, ..PolicyLoss::new(1e-3, 0.0).unwrap() };
        let scales: Vec<f64> = weights.pool().iter().map(|&step| {
            let t = Transition::stochastic(&schedule, &noise_level, step);
            let term = loss.term(0.3, 0.3, 1.0, weights.weight(step), StepChange::new(&t, 0.0));
            (term.grad_log_prob * t.gradient_scale()).abs()
        }).collect();
        for scale in &scales {
            close(scale / scales[0], 1.0, 1e-10)?;
        }
    }

    #[test]
    fn weights_average_one_over_the_pool(grid in grid(), n in 12usize..60, shift in 1.0..8.0, noise_level in noise_level(),
                                         name in prop::sample::select(Recipe::NAMES.to_vec())) {
        let schedule = Schedule::new(grid, n, shift).unwrap();
        let recipe = Recipe { noise_level, ..Recipe::named(name).unwrap() };
        prop_assume!(recipe.validate(n).is_ok());
        let weights = LossWeights::new(&recipe, &schedule).unwrap();
        let sum: f64 = weights.pool().iter().map(|&step| weights.weight(step)).sum();
        close(sum / weights.pool().len() as f64, 1.0, 1e-12)?;
        let outside: f64 = (0..n).filter(|step| !weights.pool().contains(step)).map(|step| weights.weight(step)).sum();
        prop_assert_eq!(outside, 0.0);
    }

    /// The plan of a rollout depends on its key alone; group members agree under iso-temporal grouping.
    #[test]
    fn plans_are_pure_and_shared(seed: u64, iteration in 0u64..1000, prompt in 0u64..1000, n in 12usize..60,
                                 name in prop::sample::select(Recipe::NAMES.to_vec())) {
        let recipe = Recipe::named(name).unwrap();
        let forwards: Vec<StepPlan> = (0..8).map(|rollout| recipe.plan(seed, iteration, prompt, rollout, n)).collect();
        let mut backwards: Vec<StepPlan> = (0..8).rev().map(|rollout| recipe.plan(seed, iteration, prompt, rollout, n)).collect();
        backwards.reverse();
        prop_assert_eq!(&forwards, &backwards);
        if recipe.sharing != StepSharing::PerRollout {
            prop_assert!(forwards.iter().all(|plan| plan == &forwards[0]));
        }
        if recipe.sharing == StepSharing::PerIteration {
            prop_assert_eq!(&forwards[0], &recipe.plan(seed, iteration, prompt + 1, 0, n));
        }
        let pool = recipe.stochastic.pool(n);
        for plan in &forwards {
            prop_assert!(plan.stochastic.iter().all(|step| pool.contains(step) && step + 1 < n));
            prop_assert!(!plan.trained.is_empty() && plan.trained.iter().all(|&step| plan.is_stochastic(step)));
            prop_assert!(plan.trained.is_sorted() && plan.stochastic.is_sorted());
        }
    }

    #[test]
    fn on_policy_the_ratio_is_exactly_one(log_prob in -10.0..10.0f64, advantage in -5.0..5.0f64, weight in 0.1..2.0f64) {
        let loss = PolicyLoss::new(1e-4, 0.0).unwrap();
        let term = loss.term(log_prob, log_prob, advantage, weight, StepChange { kl: 0.0, std: 0.3 });
        prop_assert_eq!(term.ratio, 1.0);
        prop_assert_eq!(term.grad_log_prob, -weight * advantage);
        prop_assert!(!term.clipped);
    }

    /// The loss is flat exactly where it should be, and its gradient is its slope.
    #[test]
    fn gradient_is_the_slope_of_the_loss(old in -2.0..2.0f64, change in -0.5..0.5f64, advantage in -5.0..5.0f64,
                                         drift in 0.0..0.1f64, scale in 0.1..1.0f64) {
        let loss = PolicyLoss { ratio: RatioKind::Normalised, ..PolicyLoss::new(0.2, 0.0).unwrap() };
        let at = |log_prob: f64| loss.term(log_prob, old, advantage, 0.7, StepChange { kl: drift, std: scale });
        let d = 1e-6;
        let here = at(old + change);
        prop_assume!(((here.ratio - 1.0).abs() - 0.2).abs() > 1e-4);
        close(here.grad_log_prob, (at(old + change + d).loss - at(old + change - d).loss) / (2.0 * d), 1e-6)?;
    }

    #[test]
    fn advantages_are_centred_and_bounded(rewards in prop::collection::vec(-3.0..3.0f64, 12), clip in 0.5..6.0f64) {
        let layout = GroupLayout::new(3, 4).unwrap();
        for scale in [AdvantageScale::BatchStd, AdvantageScale::GroupStd, AdvantageScale::GroupStdUnbiased, AdvantageScale::None] {
            let free = advantages(&rewards, &layout, scale, f64::INFINITY);
            for prompt in 0..3 {
                close(free[layout.samples(prompt)].iter().sum(), 0.0, 1e-9)?;
            }
            prop_assert!(advantages(&rewards, &layout, scale, clip).iter().all(|a| a.abs() <= clip));
        }
    }
}

#[test]
fn every_step_of_the_pool_is_drawn() {
    let recipe = Recipe::flash_grpo();
    let mut counts = [0; 10];
    for iteration in 0..100 {
        for prompt in 0..100 {
            counts[recipe.plan(7, iteration, prompt, 0, 20).stochastic[0]] += 1;
        }
    }
    assert!(counts.iter().all(|&count| (850..1150).contains(&count)), "{counts:?}");
    let distinct: std::collections::HashSet<_> = (0..24).map(|prompt| recipe.plan(7, 0, prompt, 0, 20).stochastic).collect();
    assert!(distinct.len() > 5, "prompts of a batch have different steps");
}

#[test]
fn the_window_slides_and_starts_over() {
    let recipe = Recipe::named("mixgrpo").unwrap();
    let start = |iteration| recipe.plan(1, iteration, 0, 0, 25).stochastic[0];
    assert_eq!([start(0), start(24), start(25), start(50), start(25 * 20), start(25 * 21)], [0, 0, 1, 2, 20, 0]);
    assert_eq!(recipe.plan(1, 500, 0, 0, 25).stochastic, [20, 21, 22, 23]);
}

#[test]
fn a_decaying_window_hurries_towards_the_data() {
    let recipe = Recipe {
        stochastic: StochasticSteps::Sliding { size: 2, stride: 1, every: 8, decay: Some(Decay { rate: std::f64::consts::LN_2, from: 1 }) },
        ..Recipe::named("mixgrpo").unwrap()
    };
    let starts: Vec<usize> = (0..25).map(|iteration| recipe.plan(1, iteration, 0, 0, 7).stochastic[0]).collect();
    // 8, 8, 4, 2 and 1 iterations at 0, 1, 2, 3 and 4, then from the start
    let expected = [(0, 8), (1, 8), (2, 4), (3, 2), (4, 1), (0, 2)];
    assert_eq!(starts, expected.into_iter().flat_map(|(start, count)| vec![start; count]).collect::<Vec<_>>());
}

/// Beyond the mask, a sample that would move on has no gradient, one that comes back has its full one.
#[test]
fn the_kl_mask_stops_what_moves_on() {
    let loss = PolicyLoss { kl_mask: Some(1e-3), ..PolicyLoss::new(1e-4, 0.0).unwrap() };
    let (near, far) = (StepChange { kl: 0.9e-3, std: 0.3 }, StepChange { kl: 1.1e-3, std: 0.3 });
    for (advantage, change) in [(1.0, 0.1), (-1.0, -0.1)] {
        let slope = |step: StepChange, change: f64| loss.term(change, 0.0, advantage, 0.5, step).grad_log_prob;
        let full = |change: f64| -0.5 * advantage * f64::exp(change);
        assert_eq!([slope(near, change), slope(far, change), slope(far, -change)], [full(change), 0.0, full(-change)]);
        let term = loss.term(change, 0.0, advantage, 0.5, far);
        assert_eq!((term.loss, term.clipped), (full(change), true));
        assert!(!loss.term(change, 0.0, advantage, 0.5, near).clipped, "the ratio does not matter");
    }
}

#[test]
fn a_thinned_schedule_keeps_to_the_grid() {
    let schedule = Schedule::new(SigmaGrid::Unipc, 10, 3.0).unwrap();
    assert_eq!(schedule.thinned(0, 10), schedule);
    let thinned = schedule.thinned(3, 3);
    assert_eq!(thinned.sigmas(), [schedule.sigma(3), schedule.sigma(5), schedule.sigma(8), 0.0]);
    assert_eq!((thinned.num_steps(), thinned.timestep(1)), (3, schedule.timestep(5)));
}

#[test]
fn dancegrpo_trains_sixty_percent_of_its_steps() {
    let recipe = Recipe::named("dancegrpo").unwrap();
    let plan = recipe.plan(1, 0, 0, 0, 16);
    assert_eq!((plan.stochastic.len(), plan.trained.len()), (15, 9));
    assert_ne!(plan, recipe.plan(1, 0, 0, 1, 16));
}

#[test]
fn nonsense_is_refused_with_a_hint() {
    let flash = Recipe::flash_grpo;
    let message = |recipe: Recipe, num_steps| {
        let error = recipe.validate(num_steps).unwrap_err();
        format!("{}: {error}; {}", error.field(), error.hint())
    };
    assert_eq!(
        message(flash(), 10),
        "stochastic.pool: `stochastic.pool` is `10`, expected 1 to 9; 10 steps leave 0 to 8 for noise, the last one stays deterministic"
    );
    let no_steps = Recipe { stochastic: StochasticSteps::Random { count: 0, pool: 3 }, ..flash() };
    assert!(message(no_steps, 10).starts_with("stochastic.count"));
    let half_a_step = Recipe { trained: TrainedSteps::Fraction { fraction: 0.5 }, ..flash() };
    assert!(message(half_a_step, 20).starts_with("trained.fraction"));
    let still = |stride| {
        let stochastic = StochasticSteps::Sliding { size: 4, stride, every: 25, decay: None };
        Recipe { stochastic, ..Recipe::named("mixgrpo").unwrap() }
    };
    for stride in [0, 16, 32] {
        let message = message(still(stride), 20);
        assert!(
            message.contains("expected no multiple of 16") && message.ends_with("the window would never move; MixGRPO uses 1"),
            "{message}"
        );
    }
    still(4).validate(20).unwrap(); // windows side by side
    still(0).validate(5).unwrap(); // there is one place
    let silent = Recipe { noise_level: NoiseLevel::Linear { eta: 0.0 }, ..flash() };
    assert!(message(silent, 20).starts_with("noise_level.eta"));
    let twice = Recipe { loss_weight: LossWeight::NoiseLevel, ..Recipe::named("grpo-guard").unwrap() };
    assert!(message(twice, 20).starts_with("loss_weight"));
    assert!(GroupLayout::new(4, 1).is_err() && GroupLayout::new(0, 8).is_err());
    assert!(PolicyLoss::new(0.0, 0.0).is_err() && PolicyLoss::new(1e-3, -1.0).is_err());
    let unmeasurable = Recipe { kl_mask: Some(0.0), ..flash() };
    assert!(message(unmeasurable, 20).starts_with("kl_mask"));
    let bare = NoiseLevel::Cps { eta: 0.9, density: Density::Unnormalised };
    let unequal = Recipe { noise_level: bare, ..Recipe::named("grpo-guard").unwrap() };
    assert!(message(unequal, 20).starts_with("noise_level.density"));
    assert!(Schedule::new(SigmaGrid::Unipc, 0, 3.0).is_err() && Schedule::new(SigmaGrid::Unipc, 10, f64::NAN).is_err());
    for sigmas in [vec![], vec![0.0], vec![1.0, 1.0, 0.0], vec![1.0, 0.5], vec![1.5, 0.0], vec![f64::NAN, 0.0]] {
        assert!(Schedule::from_sigmas(SigmaGrid::Unipc, sigmas).is_err());
    }
}

#[test]
fn every_named_recipe_is_valid_and_survives_serde() {
    for name in Recipe::NAMES {
        let recipe = Recipe::named(name).unwrap();
        recipe.validate(25).unwrap_or_else(|error| panic!("{name}: {error}"));
        let text = serde_json::to_string(&recipe).unwrap();
        assert_eq!(serde_json::from_str::<Recipe>(&text).unwrap(), recipe, "{text}");
    }
    assert!(Recipe::named("ppo").is_none());
}
