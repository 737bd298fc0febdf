//! `flash-grpo doctor`: what can compute on this machine, and whether it computes correctly.

mod machine;

use anyhow::{Result, bail};
use clap::Args;
use machine::{Machine, no_device};
use serde::Serialize;
use wan::device::{Backend, FoundDevice, HALF_TOLERANCE, OpenDevice, cpu, try_device};

/// Arguments of `doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Everything that was found.
#[derive(Debug, Serialize)]
struct Report {
    version: &'static str,
    /// Cargo features for devices that this program was built with.
    features: Vec<&'static str>,
    machine: Machine,
    devices: Vec<DeviceReport>,
    backends: Vec<BackendReport>,
}

/// A backend without any device.
#[derive(Debug, Serialize)]
struct BackendReport {
    backend: &'static str,
    compiled_in: bool,
    /// Why there is nothing, and what to do.
    reason: String,
    hint: String,
}

/// One device, and what came of trying it.
#[derive(Debug, Serialize)]
struct DeviceReport {
    device: String,
    name: String,
    software: bool,
    memory_bytes: Option<u64>,
    #[serde(flatten)]
    outcome: Outcome,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case", tag = "result")]
enum Outcome {
    /// Forward and backward are those of the CPU, up to the tolerance.
    Passed(Deviations),
    /// They are not.
    Deviates(Deviations),
    /// There was no result to compare.
    Failed { reason: String },
}

/// max |a - b| / max |b| against the CPU.
#[derive(Debug, Serialize)]
struct Deviations {
    velocity: f64,
    gradients: f64,
    tolerance: f64,
    first_s: f64,
    second_s: f64,
    half: Option<HalfDeviations>,
}

/// The same in half precision, against f32.
#[derive(Debug, Serialize)]
struct HalfDeviations {
    dtype: &'static str,
    velocity: f64,
    gradients: f64,
    tolerance: f64,
    fused_attention: bool,
}

/// Runs the command.
///
/// # Errors
/// A device that is there and does not work.
pub fn run_command(args: &DoctorArgs) -> Result<()> {
    let mut devices = vec![tried(&cpu(), false)];
    let mut backends = Vec::new();
    for backend in Backend::GPUS {
        match backend.devices() {
            Ok(found) if found.is_empty() => backends.push(absent(backend, "no driver, or no device of this kind", no_device(backend))),
            Ok(found) => devices.extend(found.iter().map(opened)),
            Err(_) if !backend.is_compiled_in() => {
                backends.push(absent(backend, "not compiled in", format!("build with {}", backend.build_command())));
            }
            Err(error) => backends.push(absent(backend, "the driver cannot be asked", error.to_string())),
        }
    }
    let features = Backend::GPUS.into_iter().filter(|backend| backend.is_compiled_in()).map(Backend::name).collect();
    let report = Report { version: env!("CARGO_PKG_VERSION"), features, machine: Machine::look(), devices, backends };
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print!("{}", text(&report));
    }
    let broken: Vec<&str> = report.devices.iter().filter(|device| device.is_broken()).map(|device| device.device.as_str()).collect();
    if broken.is_empty() {
        return Ok(());
    }
    bail!("`{}` is there, but does not work\nhint: update its driver; `--device cpu` always works", broken.join("`, `"))
}

fn absent(backend: Backend, reason: &str, hint: String) -> BackendReport {
    BackendReport { backend: backend.name(), compiled_in: backend.is_compiled_in(), reason: reason.to_owned(), hint }
}

/// Opens a device and tries it.
fn opened(found: &FoundDevice) -> DeviceReport {
    match found.open() {
        Ok(open) => tried(&open, found.is_software),
        Err(error) => DeviceReport {
            device: found.choice().to_string(),
            name: "unknown".to_owned(),
            software: found.is_software,
            memory_bytes: None,
            outcome: Outcome::Failed { reason: error.to_string() },
        },
    }
}

fn tried(open: &OpenDevice, software: bool) -> DeviceReport {
    let outcome = match try_device(open) {
        Ok(trial) => {
            let deviations = Deviations {
                velocity: trial.velocity,
                gradients: trial.gradients,
                tolerance: trial.tolerance,
                first_s: trial.first.as_secs_f64(),
                second_s: trial.second.as_secs_f64(),
                half: trial.half.map(|half| HalfDeviations {
                    dtype: half.dtype.name(),
                    velocity: half.velocity,
                    gradients: half.gradients,
                    tolerance: HALF_TOLERANCE,
                    fused_attention: half.fused,
                }),
            };
            if trial.passed() { Outcome::Passed(deviations) } else { Outcome::Deviates(deviations) }
        }
        Err(reason) => Outcome::Failed { reason },
    };
    DeviceReport { device: open.choice.to_string(), name: open.name.clone(), software, memory_bytes: open.memory, outcome }
}

impl DeviceReport {
    fn is_broken(&self) -> bool {
        !matches!(self.outcome, Outcome::Passed(_))
    }
}

/// The report for people.
fn text(report: &Report) -> String {
    let features =
        if report.features.is_empty() { "none: this program computes on the CPU only".to_owned() } else { report.features.join(", ") };
    let mut text = format!("flash-grpo {}\nfeatures   {features}\n{}\n", report.version, report.machine);
    for device in &report.devices {
        text += &format!("{:<10} {}{}{}\n", device.device, device.name, notes(device), result(&device.outcome));
    }
    for absent in &report.backends {
        text += &format!("{:<10} {}\n           hint: {}\n", absent.backend, absent.reason, indented(&absent.hint));
    }
    text
}

fn notes(device: &DeviceReport) -> String {
    let memory = device.memory_bytes.map(|bytes| format!(", {:.1} GiB", gib(bytes))).unwrap_or_default();
    let software = if device.software { ", a driver that computes on the processor: for tests, never fast" } else { "" };
    format!("{memory}{software}")
}

fn result(outcome: &Outcome) -> String {
    let numbers = |d: &Deviations| {
        let half = d.half.as_ref().map(|half| {
            let attention = if half.fused_attention { "; attention fused" } else { "" };
            let HalfDeviations { dtype, velocity, gradients, tolerance, .. } = half;
            format!("\n           {dtype}: forward {velocity:.1e}, backward {gradients:.1e} from f32 on the CPU (allowed: {tolerance:.0e}){attention}")
        });
        format!(
            "forward {:.1e}, backward {:.1e} from the CPU (allowed: {:.0e}); first pass {:.2} s, second {:.3} s{}",
            d.velocity,
            d.gradients,
            d.tolerance,
            d.first_s,
            d.second_s,
            half.unwrap_or_default()
        )
    };
    match outcome {
        Outcome::Passed(deviations) => format!("\n           works: {}", numbers(deviations)),
        Outcome::Deviates(deviations) => format!("\n           WRONG: {}", numbers(deviations)),
        Outcome::Failed { reason } => format!("\n           FAILS: {}", indented(reason)),
    }
}

fn indented(text: &str) -> String {
    text.replace('\n', "\n           ")
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1_u32 << 30)
}
