//! `flash-grpo plan`: what a run will take. Needs no weights.

use super::train::RecipeArgs;
use anyhow::{Result, bail};
use clap::Args;
use train::plan::{Machine, ModelSizes, PhaseMemory, Plan, TextLength, gib, matrix_rate};
use train::settings::MixedPrecision;

/// Arguments of `plan`.
#[derive(Debug, Args)]
pub struct PlanArgs {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Memory of one device, for instance `80GiB`: says whether the run fits, and what to change if it does not.
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    device_memory: Option<u64>,
    /// Devices that share the samples of an iteration, without losses: what the method allows, for a process uses one so far.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    devices: u64,
    /// Speed of one device in TFLOP/s, as the run reaches it.
    #[arg(long, value_name = "TFLOPS", group = "speed")]
    throughput: Option<f64>,
    /// Measure the speed of this machine with a matrix product of two seconds: the upper limit of what a run on it reaches.
    #[arg(long, group = "speed")]
    measure: bool,
    /// Price of one device for an hour.
    #[arg(long, value_name = "PRICE", requires = "speed")]
    price_per_hour: Option<f64>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// A recipe that cannot be read or used; a model that is not there and is none of the released ones.
pub fn run_command(args: &PlanArgs) -> Result<()> {
    let settings = args.recipe.load()?;
    let given = [("--throughput", args.throughput), ("--price-per-hour", args.price_per_hour)];
    for (name, value) in given.iter().filter_map(|(name, value)| Some((name, (*value)?))) {
        if !(value.is_finite() && value > 0.0) {
            bail!("`{name}` is `{value}`, expected a number above 0\nhint: `--measure` times this machine");
        }
    }
    let model = ModelSizes::of(&settings)?;
    let flops = if args.measure { Some(matrix_rate()) } else { args.throughput.map(|tera| tera * 1e12) };
    let machine = Machine { memory: args.device_memory, devices: args.devices, flops, price_per_hour: args.price_per_hour };
    let plan = Plan::new(&settings, &model, TextLength::of(&settings), machine)?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&plan)?);
    } else {
        print!("{}", text(&plan));
    }
    Ok(())
}

/// `80GiB`, `24GB`, or bytes.
fn bytes(text: &str) -> Result<u64, String> {
    const UNITS: [(&str, f64); 6] = [
        ("GiB", (1_u64 << 30) as f64),
        ("MiB", (1_u64 << 20) as f64),
        ("TiB", (1_u64 << 40) as f64),
        ("GB", 1e9),
        ("MB", 1e6),
        ("TB", 1e12),
    ];
    let (number, unit) = UNITS.iter().find_map(|(name, unit)| Some((text.strip_suffix(name)?, *unit))).unwrap_or((text, 1.0));
    match number.trim().parse::<f64>() {
        Ok(value) if value > 0.0 && value.is_finite() => Ok((value * unit) as u64),
        _ => Err("expected a size such as `80GiB` or `24GB`".into()),
    }
}

fn text(plan: &Plan) -> String {
    let sections = [parameters(plan), work(plan), operations(plan), memory(plan), time_and_price(plan), devices(plan)];
    let sections: Vec<String> = sections.iter().filter(|lines| !lines.is_empty()).map(|lines| lines.join("\n")).collect();
    sections.join("\n\n") + "\n"
}

fn parameters(plan: &Plan) -> Vec<String> {
    let counts = &plan.parameters;
    let rows = [
        ("transformer", counts.transformer),
        ("second transformer", counts.second_transformer),
        ("autoencoder", counts.vae),
        ("text encoder", counts.text_encoder),
        ("trained", counts.trained),
    ];
    let row = |(name, count): (&str, u64)| format!("  {name:<24}{:>14}", grouped(count));
    std::iter::once("parameters".to_owned()).chain(rows.into_iter().filter(|(_, count)| *count > 0).map(row)).collect()
}

fn work(plan: &Plan) -> Vec<String> {
    let work = &plan.work;
    let [c, f, h, w] = work.latents;
    let source = if work.text.counted { "the longest prompt" } else { "the most that the recipe allows" };
    vec![
        "work of an iteration".into(),
        format!("  latents                 {c} x {f} x {h} x {w}, {} tokens", grouped(work.tokens)),
        format!("  text                    {} tokens, {source}", work.text.longest),
        format!("  rollouts                {}, {:.0} velocities of {} branch(es)", work.samples, work.velocities, work.branches),
        format!("  trained transitions     {:.0}", work.replayed + work.retained),
    ]
}

fn operations(plan: &Plan) -> Vec<String> {
    let (flops, work) = (&plan.flops, &plan.work);
    let forward = &flops.forward;
    let parts = [
        ("scores", forward.self_scores),
        ("projections", forward.self_projections),
        ("feed-forward", forward.feed_forward),
        ("cross", forward.cross),
    ];
    let parts: Vec<String> = parts.iter().map(|(name, value)| format!("{name} {}", operation_count(*value))).collect();
    let iteration = plan.iteration_flops();
    let share = |part: f64| 100.0 * part / iteration;
    let [rollout, decode, update] = [flops.rollout_phase, flops.decode_phase, flops.update_phase].map(share);
    vec![
        "operations".into(),
        format!("  a forward pass          {}: {}", operation_count(forward.total()), parts.join(", ")),
        format!("  a training step         {} for a branch", operation_count(flops.update)),
        format!("  decoding a sample       {}", operation_count(flops.decode)),
        format!(
            "  an iteration            {}: rollout {rollout:.0} %, decode {decode:.0} %, update {update:.0} %",
            operation_count(iteration)
        ),
        format!("  an evaluation           {}: {} videos", operation_count(flops.evaluation), work.eval_videos),
        format!(
            "  the run                 {}: {} iterations, {} evaluations",
            operation_count(flops.run),
            work.iterations,
            work.evaluations
        ),
    ]
}

fn memory(plan: &Plan) -> Vec<String> {
    let numbers = match plan.mixed_precision {
        MixedPrecision::No => "in f32",
        MixedPrecision::Bf16 => "frozen weights in bf16",
    };
    let mut lines = vec![format!("peak memory of a device, {numbers}")];
    lines.extend(plan.memory.iter().flat_map(phase));
    lines.push("memory of the host, on a CPU beside a phase's".into());
    lines.extend(plan.host.iter().flat_map(phase));
    if let (Some(memory), Some(fits)) = (plan.machine.memory, plan.fits) {
        let verdict = if fits { "fits" } else { "does not fit" };
        lines.push(format!("the peak of {} {verdict} into {}", gib(plan.peak()), gib(memory)));
    }
    lines.extend(plan.advice.iter().map(|advice| format!("hint: {advice}")));
    lines
}

fn phase(phase: &PhaseMemory) -> Vec<String> {
    let parts = phase.parts.iter().map(|(name, bytes)| format!("    {name:<34}{:>10}", gib(*bytes)));
    std::iter::once(format!("  {:<36}{:>10}", phase.phase, gib(phase.total))).chain(parts).collect()
}

fn time_and_price(plan: &Plan) -> Vec<String> {
    let (Some(seconds), Some(rate)) = (&plan.seconds, plan.machine.flops) else { return Vec::new() };
    let [iteration, rollout, decode, update] = [seconds.iteration, seconds.rollout, seconds.decode, seconds.update].map(time);
    let price = seconds.price.map(|price| format!(", price {price:.2}")).unwrap_or_default();
    vec![
        format!("time on {} device(s) of {}/s, without rewards", plan.machine.devices, operation_count(rate)),
        format!("  an iteration            {iteration}: rollout {rollout}, decode {decode}, update {update}"),
        format!("  an evaluation           {}", time(seconds.evaluation)),
        format!("  the run                 {}, {:.1} device hours{price}", time(seconds.run), seconds.device_hours),
    ]
}

fn devices(plan: &Plan) -> Vec<String> {
    let note = "note: one process uses one device today; figures for more are what the method allows";
    (plan.machine.devices > 1).then(|| note.to_owned()).into_iter().collect()
}

fn operation_count(flops: f64) -> String {
    scaled(flops, [(1e18, "EFLOP"), (1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP")], "MFLOP", 1e6)
}

fn time(seconds: f64) -> String {
    scaled(seconds, [(86400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s")], "ms", 1e-3)
}

/// Three digits in the largest unit that makes the number at least 1.
fn scaled(value: f64, units: [(f64, &str); 4], least: &str, size: f64) -> String {
    let (size, unit) = units.into_iter().find(|(size, _)| value >= *size).unwrap_or((size, least));
    let value = value / size;
    let digits = if value >= 100.0 {
        0
    } else if value >= 10.0 {
        1
    } else {
        2
    };
    format!("{value:.digits$} {unit}")
}

/// Digits in groups of three.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read() {
        assert_eq!(bytes("80GiB"), Ok(80 << 30));
        assert_eq!(bytes("1.5 GB"), Ok(1_500_000_000));
        assert_eq!(bytes("1024"), Ok(1024));
        for wrong in ["", "GiB", "-3GiB", "80 giga", "infGB"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn numbers_are_readable() {
        assert_eq!(grouped(1_418_996_800), "1,418,996,800");
        assert_eq!(grouped(7), "7");
        assert_eq!(operation_count(283.4e12), "283 TFLOP");
        assert_eq!(time(90.0), "1.50 min");
    }
}
