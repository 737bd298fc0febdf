//! A rehearsal of a run: loads the recipe's model, makes one iteration (rollouts, then decoding, then the updates, none beside another), and compares time
//! and peak memory of each phase with the plan. Nothing is scored: models with random weights show nothing.
//!
//! ```text
//! rehearse [--device DEVICE] RECIPE [KEY=VALUE ..]
//! ```
//!
//! Prints one line of JSON for each phase. Peaks are read from /proc on the CPU, so on Linux alone; on CUDA they are what nvidia-smi says of the
//! card, several times a second. Elsewhere than on the CPU, everything is done twice, because the first time compiles the kernels, and the second
//! is set against the rate of the device's own matrix products.

use burn::tensor::{DType, Device, Tensor};
use std::collections::BTreeMap;
use std::io::Write;
use std::ops::Range;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use train::batch::{Batch, decoded_at_once, pieces};
use train::plan::{Machine, ModelSizes, Plan, TextLength};
use train::replay::TransitionBatch;
use train::rollout::Rollouts;
use train::settings::Settings;
use train::trainer::Trainer;
use train::update::update;
use wan::device::{Backend, DeviceChoice, is_cpu};
use wan::weights::to_floats;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() {
    let _ = rayon::ThreadPoolBuilder::new().use_current_thread().build_global();
    let mut args: Vec<String> = std::env::args().skip(1).collect();
    let mut choice = DeviceChoice::default();
    if args.first().is_some_and(|arg| arg == "--device") && args.len() > 1 {
        choice = args[1].parse().unwrap_or_else(|error| panic!("{error}"));
        args.drain(..2);
    }
    let opened = choice.open().unwrap_or_else(|error| panic!("{error}"));
    let (recipe, overrides) = args.split_first().expect("usage: rehearse [--device DEVICE] RECIPE [KEY=VALUE ..]");
    let settings = Settings::load(Some(recipe.as_ref()), overrides).unwrap_or_else(|error| panic!("{error}"));
    let model = ModelSizes::of(&settings).expect("sizes");
    let plan = Plan::new(&settings, &model, TextLength::of(&settings), Machine::default()).expect("plan");
    let mut phases = Phases { plan, start: Instant::now(), peak: Peak::of(opened.choice) };
    let mut trainer = Trainer::new(settings, &opened.device).unwrap_or_else(|error| panic!("{error}"));
    phases.end("load");
    rehearse(&mut trainer, &mut phases, 0);
    if !is_cpu(&opened.device) {
        let seconds = rehearse(&mut trainer, &mut phases, 1);
        print_rates(&phases.plan, &seconds, &opened.name, &opened.device);
    }
}

/// The parts of an iteration one after the other; seconds of each. Every second sample counts as better than the others.
fn rehearse(trainer: &mut Trainer, phases: &mut Phases, index: u64) -> BTreeMap<&'static str, f64> {
    let batch = Batch::plan(&trainer.settings, trainer.train_prompts.len(), index).expect("a plan");
    let roll_out = |chunk: &Range<usize>| {
        let rollouts = batch.roll_out(trainer, chunk, false).unwrap_or_else(|error| panic!("{error}"));
        to_floats(rollouts.latents.clone()); // waits for it
        rollouts
    };
    let rollouts: Vec<Rollouts> = batch.updates.iter().flatten().map(roll_out).collect();
    let mut seconds = BTreeMap::from([("rollout", phases.end("rollout"))]);
    for rollouts in &rollouts {
        for part in pieces(0..rollouts.latents.dims()[0], decoded_at_once(&trainer.settings)) {
            let latents = rollouts.latents.clone().narrow(0, part.start, part.len());
            trainer.decode_for_reward(latents).unwrap_or_else(|error| panic!("{error}"));
        }
    }
    seconds.insert("decode", phases.end("decode"));
    let advantages: Vec<f64> = (0..batch.plans.len()).map(|sample| if sample % 2 == 0 { 1.0 } else { -1.0 }).collect();
    let recorded: Vec<Vec<TransitionBatch>> = rollouts.into_iter().map(|rollouts| rollouts.transitions).collect();
    for batches in batch.transitions(&recorded, &advantages) {
        let (ema, objective, collective) = (trainer.ema.as_mut(), &trainer.objective, &*trainer.collective);
        let metrics = update(&trainer.policy, &mut trainer.optimizer, ema, objective, &batches, collective, &trainer.stop)
            .unwrap_or_else(|error| panic!("{error}"));
        print(&serde_json::json!({ "ratio_deviation": metrics.ratio_deviation(), "grad_norm": metrics.grad_norm }));
    }
    trainer.policy.params().snapshot().into_iter().for_each(|weights| drop(to_floats(weights.narrow(0, 0, 1))));
    seconds.insert("update", phases.end("update"));
    seconds
}

/// Operations of each phase for a second, and as a share of what products of large matrices reach on the same device.
fn print_rates(plan: &Plan, seconds: &BTreeMap<&'static str, f64>, name: &str, device: &Device) {
    let matrix = |dtype| matrix_rate(device, dtype);
    let rates = [("f32", matrix(DType::F32)), ("bf16", if device.supports_dtype(DType::BF16) { matrix(DType::BF16) } else { 0.0 })];
    let best = rates.iter().fold(0.0, |best: f64, (_, rate)| best.max(*rate));
    print(&serde_json::json!({
        "device": name,
        "matrix_tflops": BTreeMap::from(rates.map(|(dtype, rate)| (dtype, rate / 1e12))),
    }));
    let flops = &plan.flops;
    for (phase, flops) in [("rollout", flops.rollout_phase), ("decode", flops.decode_phase), ("update", flops.update_phase)] {
        let rate = flops / seconds.get(phase).copied().unwrap_or(f64::NAN);
        print(&serde_json::json!({ "phase": phase, "tflop": flops / 1e12, "tflops": rate / 1e12, "share_of_matrix_rate": rate / best }));
    }
    let velocities = plan.work.velocities * plan.work.branches as f64;
    print(&serde_json::json!({ "seconds_of_a_forward": seconds.get("rollout").map(|seconds| seconds / velocities) }));
}

/// Operations a second of products of square matrices, as large as take a hundredth of a second; the median of five. 0 if they are wrong.
fn matrix_rate(device: &Device, dtype: DType) -> f64 {
    const PRODUCTS: i32 = 8;
    let rate = |side: usize| {
        let matrix: Tensor<2> = Tensor::ones([side, side], (device, dtype));
        let seconds = || {
            let start = Instant::now();
            let product = (0..PRODUCTS).fold(matrix.clone(), |product, _| product.matmul(matrix.clone()).mul_scalar(1.0 / side as f32));
            let values: Vec<f32> = to_floats(product.narrow(0, side - 1, 1)); // waits for it
            let right = values.iter().all(|value| (value - 1.0).abs() < 0.1);
            if right { start.elapsed().as_secs_f64() / f64::from(PRODUCTS) } else { f64::INFINITY }
        };
        seconds(); // compiles
        let mut seconds: Vec<f64> = (0..5).map(|_| seconds()).collect();
        seconds.sort_by(f64::total_cmp);
        (2.0 * (side as f64).powi(3) / seconds[2], seconds[2])
    };
    let mut side = 256;
    loop {
        let (operations, seconds) = rate(side);
        if seconds > 0.01 || side == 16_384 {
            return operations;
        }
        side *= 2;
    }
}

/// What each phase took, beside what was planned.
struct Phases {
    plan: Plan,
    start: Instant,
    peak: Peak,
}

impl Phases {
    /// Seconds since the last one.
    fn end(&mut self, phase: &str) -> f64 {
        let seconds = self.start.elapsed().as_secs_f64();
        let planned = self.plan.memory.iter().find(|planned| planned.phase == phase).map(|planned| planned.total >> 20);
        let peak = self.peak.take_mib();
        print(&serde_json::json!({
            "phase": phase,
            "seconds": seconds,
            "peak_mib": peak,
            "planned_mib": planned,
            "planned_to_measured": planned.zip(peak).map(|(planned, peak)| planned as f64 / peak as f64),
        }));
        self.start = Instant::now();
        seconds
    }
}

fn print(line: &serde_json::Value) {
    let _ = std::io::stdout().lock().write_all(format!("{line}\n").as_bytes());
}

/// Where the largest memory since the last look comes from.
enum Peak {
    /// Resident memory of this process.
    Process,
    /// Memory of the card, watched by a thread. MiB
    Card(Arc<AtomicU64>),
    Unknown,
}

impl Peak {
    fn of(choice: DeviceChoice) -> Self {
        match choice {
            DeviceChoice::Of(Backend::Cpu, _) => Self::Process,
            DeviceChoice::Of(Backend::Cuda, index) => {
                let peak = Arc::new(AtomicU64::new(0));
                let seen = peak.clone();
                let card = card_id(index, std::env::var("CUDA_VISIBLE_DEVICES").ok().as_deref());
                std::thread::spawn(move || {
                    while let Some(used) = card_mib(&card) {
                        seen.fetch_max(used, Ordering::Relaxed);
                        std::thread::sleep(Duration::from_millis(50));
                    }
                });
                Self::Card(peak)
            }
            _ => Self::Unknown,
        }
    }

    /// The peak in MiB; that of the next phase starts here.
    fn take_mib(&self) -> Option<u64> {
        match self {
            Self::Process => {
                let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
                let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
                let _ = std::fs::write("/proc/self/clear_refs", "5");
                line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()).map(|kib| kib / 1024)
            }
            Self::Card(peak) => Some(peak.swap(0, Ordering::Relaxed)).filter(|peak| *peak > 0),
            Self::Unknown => None,
        }
    }
}

/// What nvidia-smi calls the device that CUDA counts as `index` among the `visible` ones, a list of numbers or UUIDs. (Cards of several kinds are
/// counted alike with CUDA_DEVICE_ORDER=PCI_BUS_ID alone.)
fn card_id(index: usize, visible: Option<&str>) -> String {
    let listed = visible.and_then(|visible| visible.split(',').nth(index)).map(str::trim);
    listed.filter(|id| !id.is_empty()).map_or_else(|| index.to_string(), str::to_owned)
}

fn card_mib(card: &str) -> Option<u64> {
    let arguments = ["--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id", card];
    let output = Command::new("nvidia-smi").args(arguments).output().ok()?;
    String::from_utf8(output.stdout).ok()?.trim().parse().ok()
}
