//! What a run will take, before it is started: parameters, operations, memory by phase, time, and what to change if it does not fit.
//!
//! Everything is a function of the recipe and of the model's sizes; no weight is read. Sizes of a released model are known, so a run can
//! be planned on a machine that does not have it.

mod flops;
mod measure;
mod memory;
mod sizes;

pub use flops::{ForwardFlops, decode as decode_flops, encode_text as encode_flops};
pub use measure::matrix_rate;
pub use memory::PhaseMemory;
pub use sizes::{ModelSizes, Networks, TextLength, Trained};

use crate::batch::Batch;
use crate::error::Result;
use crate::settings::{MixedPrecision, PolicySettings, Settings};
use crate::sharing;
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::ops::Range;

/// What the run has to its disposal.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Machine {
    /// Memory of one device in bytes.
    pub memory: Option<u64>,
    /// Devices that share the samples: what the method allows, for a process uses one so far.
    pub devices: u64,
    /// Floating-point operations per second of one device.
    pub flops: Option<f64>,
    /// Price of one device for an hour.
    pub price_per_hour: Option<f64>,
}

impl Default for Machine {
    fn default() -> Self {
        Self { memory: None, devices: 1, flops: None, price_per_hour: None }
    }
}

/// The plan of a run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Plan {
    /// Parameters.
    pub parameters: Parameters,
    /// What goes through the networks.
    pub work: Work,
    /// Operations.
    pub flops: Flops,
    /// What the transformer's frozen weights are held in.
    pub mixed_precision: MixedPrecision,
    /// Peak memory of each phase.
    pub memory: Vec<PhaseMemory>,
    /// What is kept outside of the device, in an iteration and in an evaluation; on a CPU in addition to each phase.
    pub host: Vec<PhaseMemory>,
    /// The machine it is planned for.
    pub machine: Machine,
    /// Whether the largest phase fits, if the memory is known.
    pub fits: Option<bool>,
    /// Seconds, if the speed is known.
    pub seconds: Option<Seconds>,
    /// What to change, the most useful first.
    pub advice: Vec<String>,
}

/// Numbers of parameters.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Parameters {
    /// Of the velocity network.
    pub transformer: u64,
    /// Of the second one; 0 if there is none.
    pub second_transformer: u64,
    /// Of the autoencoder.
    pub vae: u64,
    /// Of the text encoder.
    pub text_encoder: u64,
    /// Updated by the optimizer.
    pub trained: u64,
}

/// What goes through the networks.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Work {
    /// Latents of a sample [C, f, h, w].
    pub latents: [u64; 4],
    /// Tokens of a sample.
    pub tokens: u64,
    /// Text.
    pub text: TextLength,
    /// Branches of a velocity: 2 with guidance.
    pub branches: u64,
    /// Rollouts of an iteration.
    pub samples: u64,
    /// Velocities of an iteration's rollouts, mean over the run; less than samples x steps where something is shared or a suffix is
    /// compressed.
    pub velocities: f64,
    /// Velocities that are computed once more and backpropagated in an iteration, likewise.
    pub replayed: f64,
    /// Velocities that are backpropagated from the graph that sampling kept, likewise.
    pub retained: f64,
    /// Iterations of the run.
    pub iterations: u64,
    /// Optimizer updates of the run.
    pub updates: u64,
    /// Videos of one evaluation.
    pub eval_videos: u64,
    /// Evaluations of the run.
    pub evaluations: u64,
}

/// Operations.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Flops {
    /// One pass of one sample through the transformer, without guidance.
    pub forward: ForwardFlops,
    /// Forward, once more where activations are recomputed, and backward, of one sample and branch.
    pub update: f64,
    /// Decoding one sample.
    pub decode: f64,
    /// Encoding all prompts, once; of a single one where they are not known.
    pub text: f64,
    /// The rollouts of an iteration.
    pub rollout_phase: f64,
    /// Decoding what of them is rewarded.
    pub decode_phase: f64,
    /// The updates of an iteration.
    pub update_phase: f64,
    /// One evaluation.
    pub evaluation: f64,
    /// The whole run.
    pub run: f64,
}

/// Seconds on all devices together, without rewards, files and idle time.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Seconds {
    /// Rollouts of an iteration.
    pub rollout: f64,
    /// Decoding them.
    pub decode: f64,
    /// Updates of an iteration.
    pub update: f64,
    /// One iteration.
    pub iteration: f64,
    /// One evaluation.
    pub evaluation: f64,
    /// The run.
    pub run: f64,
    /// Hours of the run times devices.
    pub device_hours: f64,
    /// Price of the run, if that of an hour is known.
    pub price: Option<f64>,
}

impl Plan {
    /// Plans a run.
    ///
    /// # Errors
    /// Values of the recipe that make no groups or no schedule, or that the model has no use for; a video that it cannot make; an entry of
    /// `policy.target_modules` that matches no layer.
    pub fn new(settings: &Settings, model: &ModelSizes, text: TextLength, machine: Machine) -> Result<Self> {
        let eval_prompts = eval_prompts(settings);
        let of = |settings: &Settings| Self::without_advice(settings, model, text, eval_prompts, machine);
        let plan = of(settings)?;
        Ok(Self { advice: advice(&plan, settings, model, &of)?, ..plan })
    }

    fn without_advice(settings: &Settings, model: &ModelSizes, text: TextLength, eval_prompts: u64, machine: Machine) -> Result<Self> {
        settings.check_networks(model.boundary)?;
        settings.check_size(&model.transformer, &model.vae)?;
        let trained = Trained::of(settings, &model.transformer, model.networks())?;
        let batches = typical_batches(settings)?;
        let retain = settings.rollout.retain_step;
        let most = |count: &dyn Fn(&Batch) -> usize| batches.iter().map(count).max().unwrap_or(0) as u64;
        let work = work(settings, model, text, &batches, eval_prompts);
        let [_, f, h, w] = work.latents;
        let load = memory::Load {
            tokens: work.tokens,
            latents: [f, h, w],
            frames: settings.sampling.num_frames as u64,
            text,
            trained,
            recorded: most(&|batch| batch.plans.iter().map(|plan| plan.trained.len()).sum()),
            recorded_prompts: most(&recorded_prompts),
            replayed: widest_replay(&batches),
            retained: most(&|batch| batch.work(retain).retained),
            first_frame: model.gives_first_frame(settings),
            eval_prompts,
        };
        let memory = memory::phases(settings, model, &load);
        let flops = Flops::new(settings, model, &work, trained.full);
        let peak = peak(&memory);
        Ok(Self {
            parameters: Parameters {
                transformer: model.transformer.num_parameters() as u64,
                second_transformer: (model.networks() - 1) * model.transformer.num_parameters() as u64,
                vae: wan::vae::num_parameters(&model.vae) as u64,
                text_encoder: model.text_encoder.num_parameters() as u64,
                trained: trained.parameters,
            },
            fits: machine.memory.map(|memory| peak <= memory),
            seconds: machine.flops.map(|rate| Seconds::new(&work, &flops, rate, machine)),
            advice: Vec::new(),
            mixed_precision: settings.train.mixed_precision,
            work,
            flops,
            memory,
            host: memory::host(settings, model, &load),
            machine,
        })
    }

    /// Bytes of the phase that needs most.
    pub fn peak(&self) -> u64 {
        peak(&self.memory)
    }

    /// Operations of an iteration.
    pub fn iteration_flops(&self) -> f64 {
        self.flops.rollout_phase + self.flops.decode_phase + self.flops.update_phase
    }
}

fn peak(memory: &[PhaseMemory]) -> u64 {
    memory.iter().map(|phase| phase.total).max().unwrap_or(0)
}

/// Iterations whose plans are counted.
fn typical_batches(settings: &Settings) -> Result<Vec<Batch>> {
    let prompts = settings.rollout.prompts_per_iteration;
    spread(settings.train.iterations as u64, TYPICAL_ITERATIONS).map(|iteration| Batch::plan(settings, prompts, iteration)).collect()
}

/// How many they are at most.
const TYPICAL_ITERATIONS: u64 = 16;

/// Iterations that stand for `count` of them: all, or `most` that lie evenly, for what a sliding window costs depends on where it is.
pub(crate) fn spread(count: u64, most: u64) -> impl Iterator<Item = u64> {
    let taken = count.min(most);
    (0..taken).map(move |i| (u128::from(2 * i + 1) * u128::from(count) / u128::from(2 * taken)) as u64)
}

/// Samples that are replayed at once, and how many of their velocities differ: where the latter are most.
fn widest_replay(batches: &[Batch]) -> [u64; 2] {
    let replays = batches.iter().flat_map(Batch::trained).flat_map(|(_, steps)| steps);
    let sizes = replays.map(|(samples, distinct)| [samples.len() as u64, distinct as u64]);
    sizes.max_by_key(|&[samples, distinct]| (distinct, Reverse(samples))).unwrap_or([1, 1])
}

/// Prompts that are kept with the transitions: of each micro-batch once for all steps that train the same samples.
fn recorded_prompts(batch: &Batch) -> usize {
    let of_micro_batch = |(chunk, steps): (&Range<usize>, Vec<(Vec<usize>, usize)>)| {
        let trained: BTreeSet<Vec<usize>> = steps.into_iter().map(|(samples, _)| samples).collect();
        let prompts = |samples: Vec<usize>| {
            samples.into_iter().map(|sample| batch.layout.prompt(chunk.start + sample)).collect::<BTreeSet<_>>().len()
        };
        trained.into_iter().map(prompts).sum::<usize>()
    };
    batch.trained().map(of_micro_batch).sum()
}

/// Prompts of an evaluation: no more than there are, where that is known.
fn eval_prompts(settings: &Settings) -> u64 {
    let known = crate::prompts::load(&settings.prompts.eval, "prompts.eval").map_or(usize::MAX, |prompts| prompts.len());
    settings.eval.num_prompts.min(known) as u64
}

fn work(settings: &Settings, model: &ModelSizes, text: TextLength, batches: &[Batch], eval_prompts: u64) -> Work {
    let (sampling, vae) = (&settings.sampling, &model.vae);
    let latents =
        [vae.z_dim, vae.latent_frames(sampling.num_frames), sampling.height / vae.spatial_factor(), sampling.width / vae.spatial_factor()];
    let tokens: usize = latents[1..].iter().zip(model.transformer.patch_size).map(|(size, patch)| size / patch).product();
    let rollout = &settings.rollout;
    let work: sharing::Work = batches.iter().map(|batch| batch.work(rollout.retain_step)).sum();
    let mean = |count: usize| count as f64 / batches.len() as f64;
    let (eval, iterations) = (&settings.eval, settings.train.iterations);
    let during = (iterations - 1).checked_div(eval.every).unwrap_or(0);
    Work {
        latents: latents.map(|size| size as u64),
        tokens: tokens as u64,
        text,
        branches: if sampling.widest_guidance() == 1.0 { 1 } else { 2 },
        samples: (rollout.prompts_per_iteration * rollout.group_size) as u64,
        velocities: mean(work.sampled),
        replayed: mean(work.replayed),
        retained: mean(work.retained),
        iterations: iterations as u64,
        updates: (iterations * settings.train.updates_per_iteration) as u64,
        eval_videos: eval_prompts * eval.samples_per_prompt as u64,
        evaluations: 2 + during as u64,
    }
}

impl Flops {
    fn new(settings: &Settings, model: &ModelSizes, work: &Work, full: bool) -> Self {
        let forward = ForwardFlops::new(&model.transformer, work.tokens, work.text.longest);
        let [_, f, h, w] = work.latents;
        let tiling = settings.sampling.tiling();
        let decode = flops::decode(&model.vae, tiling, [f, h, w]);
        let passes = if settings.train.activation_checkpointing { 2.0 } else { 1.0 };
        let update = passes * forward.total() + forward.backward(full);
        let reference = if settings.train.kl_beta > 0.0 { forward.total() } else { 0.0 };
        let tokens = if work.text.prompts == 0 { work.text.longest } else { work.text.tokens };
        let text = flops::encode_text(&model.text_encoder, tokens, work.text.longest);
        let branches = work.branches as f64;
        let rollout_phase = work.velocities * branches * forward.total();
        let frames = reward::leading_frames(&settings.reward, settings.sampling.num_frames, settings.sampling.fps);
        let leading = model.vae.leading_latent_frames(frames) as u64;
        let decode_phase = work.samples as f64 * flops::decode(&model.vae, tiling, [leading.min(f), h, w]);
        // what sampling kept has been through the network once already
        let update_phase = branches * (work.replayed * (update + reference) + work.retained * (update - forward.total() + reference));
        let steps = settings.eval.num_inference_steps as f64;
        let evaluation = work.eval_videos as f64 * (steps * branches * forward.total() + decode);
        let iterations = work.iterations as f64 * (rollout_phase + decode_phase + update_phase);
        let run = text + iterations + work.evaluations as f64 * evaluation;
        Self { forward, update, decode, text, rollout_phase, decode_phase, update_phase, evaluation, run }
    }
}

impl Seconds {
    fn new(work: &Work, flops: &Flops, rate: f64, machine: Machine) -> Self {
        // samples are whole: the device with most of them decides
        let share = |count: u64| count.div_ceil(machine.devices) as f64 / count.max(1) as f64;
        let (samples, videos) = (share(work.samples), share(work.eval_videos));
        let [rollout, decode, update] = [flops.rollout_phase, flops.decode_phase, flops.update_phase].map(|f| f * samples / rate);
        let (iteration, evaluation) = (rollout + decode + update, flops.evaluation * videos / rate);
        let run = flops.text / rate + work.iterations as f64 * iteration + work.evaluations as f64 * evaluation;
        let device_hours = run / 3600.0 * machine.devices as f64;
        let price = machine.price_per_hour.map(|price| price * device_hours);
        Self { rollout, decode, update, iteration, evaluation, run, device_hours, price }
    }
}

/// What to change: each suggestion is planned itself.
fn advice(plan: &Plan, settings: &Settings, model: &ModelSizes, of: &dyn Fn(&Settings) -> Result<Plan>) -> Result<Vec<String>> {
    let with = |change: &dyn Fn(&mut Settings)| -> Result<Plan> {
        let mut changed = settings.clone();
        change(&mut changed);
        of(&changed)
    };
    let peak_with = |change: &dyn Fn(&mut Settings)| with(change).map(|plan| plan.peak());
    if plan.fits != Some(false) {
        return savings(plan, settings, &with);
    }
    let mut advice = Advice::default();
    let memory = plan.machine.memory.unwrap_or(u64::MAX);
    let verdict = |peak: u64| if peak <= memory { "which fits" } else { "which does not fit yet" };
    let kept = |s: &mut Settings| s.rollout.retain_step = false;
    let checkpointing = |s: &mut Settings| {
        kept(s);
        s.train.activation_checkpointing = true;
    };
    if settings.rollout.retain_step {
        let peak = peak_with(&kept)?;
        advice.push(format!("`rollout.retain_step = false`: peak {}, {}", gib(peak), verdict(peak)));
    }
    if !settings.train.activation_checkpointing {
        let peak = peak_with(&checkpointing)?;
        advice.push(format!("`train.activation_checkpointing = true`: peak {}, {}", gib(peak), verdict(peak)));
    }
    if settings.rollout.micro_batch > 1 {
        let peak = peak_with(&smallest)?;
        advice.push(format!("`rollout.micro_batch = 1`: peak {}, {}", gib(peak), verdict(peak)));
    }
    let (plain, tiled) = (peak_with(&smallest)?, peak_with(&tiles)?);
    if plain > memory && tiled < plain {
        advice.push(format!("`sampling.vae_tiling = true`: peak {}, {}", gib(tiled), verdict(tiled)));
    }
    let peak = peak_with(&narrowest)?;
    if tiled > memory && tiled > peak {
        advice.push(format!("`train.mixed_precision = \"bf16\"`: peak {}, {}", gib(peak), verdict(peak)));
    }
    let fits = |frames: usize| -> Result<bool> {
        let peak = peak_with(&|s| {
            narrowest(s);
            s.sampling.num_frames = frames;
        })?;
        Ok(peak <= memory)
    };
    let mut frames = settings.sampling.num_frames;
    while frames > 1 && !fits(frames)? {
        frames -= 4;
    }
    if !fits(frames)? {
        let mut narrow = settings.clone();
        narrowest(&mut narrow);
        let resident = model.networks() * memory::transformer(&narrow, &model.transformer);
        let alone = if model.boundary.is_some() { "both transformers alone take" } else { "the transformer alone takes" };
        advice.0.push(format!("not even one frame of this size fits: {alone} {}; use a larger device", gib(resident)));
    } else if frames < settings.sampling.num_frames {
        advice.push(format!("`sampling.num_frames = {frames}`, the most that fits at this height and width"));
    }
    Ok(advice.0)
}

/// The plan with some settings changed.
type With<'a> = &'a dyn Fn(&dyn Fn(&mut Settings)) -> Result<Plan>;

/// What makes a run cheaper that fits, or may fit.
fn savings(plan: &Plan, settings: &Settings, with: With<'_>) -> Result<Vec<String>> {
    let mut advice = Advice::default();
    let shared = sharing_micro_batch(plan, settings, with)?;
    if let Some((size, shared)) = &shared {
        let saved = 100.0 * (1.0 - shared.iteration_flops() / plan.iteration_flops());
        let peak = gib(shared.peak());
        advice.push(format!(
            "`rollout.micro_batch = {size}` shares the steps before the stochastic one in a group: {saved:.0} % fewer operations an iteration, peak {peak}"
        ));
    }
    let micro_batch = shared.map_or(settings.rollout.micro_batch, |(size, _)| size);
    let plain = with(&|s| {
        s.rollout.micro_batch = micro_batch;
        s.train.activation_checkpointing = false;
    })?;
    if settings.train.activation_checkpointing && plain.fits == Some(true) {
        let saved = 100.0 * plan.flops.forward.total() / plan.flops.update;
        let peak = gib(plain.peak());
        advice.push(format!("`train.activation_checkpointing = false` fits too ({peak}) and makes the update {saved:.0} % cheaper"));
    }
    Ok(advice.0)
}

/// The largest micro-batch in which rollouts of a prompt meet, at most its group, that does not outgrow the device, with its plan; none if it
/// saves nothing.
fn sharing_micro_batch(plan: &Plan, settings: &Settings, with: With<'_>) -> Result<Option<(usize, Plan)>> {
    let group = settings.rollout.group_size;
    let larger = (settings.rollout.micro_batch + 1..=group).rev().filter(|size| settings.shares_prefix() && group.is_multiple_of(*size));
    for size in larger {
        let shared = with(&|s| s.rollout.micro_batch = size)?;
        if shared.fits != Some(false) {
            return Ok((shared.iteration_flops() < plan.iteration_flops()).then_some((size, shared)));
        }
    }
    Ok(None)
}

/// Suggestions, each of which takes the ones before it for granted.
#[derive(Default)]
struct Advice(Vec<String>);

impl Advice {
    fn push(&mut self, suggestion: String) {
        let and = if self.0.is_empty() { "" } else { "that and " };
        self.0.push(format!("{and}{suggestion}"));
    }
}

fn smallest(settings: &mut Settings) {
    settings.rollout.retain_step = false;
    settings.train.activation_checkpointing = true;
    settings.rollout.micro_batch = 1;
}

/// As [`smallest`], with large frames in tiles.
fn tiles(settings: &mut Settings) {
    smallest(settings);
    settings.sampling.vae_tiling = true;
}

/// As [`tiles`], with weights in bf16 where they may be.
fn narrowest(settings: &mut Settings) {
    tiles(settings);
    if settings.policy != PolicySettings::Full {
        settings.train.mixed_precision = MixedPrecision::Bf16;
    }
}

/// Bytes as text, in GiB, or in MiB below 1 GiB.
pub fn gib(bytes: u64) -> String {
    let (size, unit) = if bytes < 1 << 30 { (1_u64 << 20, "MiB") } else { (1 << 30, "GiB") };
    format!("{:.1} {unit}", bytes as f64 / size as f64)
}
