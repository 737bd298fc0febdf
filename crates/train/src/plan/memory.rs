//! Peak memory by phase, as this program uses it: transformer (or both) and autoencoder resident, the text encoder gone before they are loaded. In bf16
//! the transformer's frozen weights, the text's keys and values and the inputs of the blocks take two bytes a number; what a graph keeps is
//! counted in f32 all the same, for that is what the operations compute with.
//!
//! The counts of activations are of tensors that are alive at once, read off `wan::transformer` and `wan::ops`. docs/scaling.md compares them
//! with measurements.
//!
//! Attention is counted as GPUs compute it, a chunk of scores at a time; on the CPU its scratch is less.
//!
//! Legend: `B` samples of a micro-batch, `L` tokens of a sample, `T` text tokens, `D` features, `E` hidden features of the feed-forward, `N`
//! blocks, `C` channels.

use super::flops::{DecoderLayer, tiles};
use super::sizes::{ModelSizes, TextLength, Trained};
use crate::batch::decoded_at_once;
use crate::first_frames::KEPT;
use crate::scoring::QUEUE_BYTES;
use crate::settings::{MixedPrecision, Settings};
use serde::Serialize;
use wan::guidance::GuidanceBatching;
use wan::image::{ImageCondition, ImageInput};
use wan::transformer::TransformerConfig;
use wan::transformer::attention::scores_at_once;
use wan::vae::VaeConfig;

/// Bytes of a number.
const F32: u64 = 4;

/// Bytes of a frozen weight or an activation of the transformer.
fn narrow(settings: &Settings) -> u64 {
    match settings.train.mixed_precision {
        MixedPrecision::No => F32,
        MixedPrecision::Bf16 => F32 / 2,
    }
}

/// Bytes of the transformer's weights.
pub(super) fn transformer(settings: &Settings, config: &TransformerConfig) -> u64 {
    let (all, wide) = (config.num_parameters() as u64, config.num_f32_parameters() as u64);
    narrow(settings) * (all - wide) + F32 * wide
}

/// What is alive at the peak of a phase.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PhaseMemory {
    /// `text`, `rollout`, `decode` or `update`; of the host's memory `an iteration` or `an evaluation`.
    pub phase: &'static str,
    /// All of it, in bytes.
    pub total: u64,
    /// Its parts.
    pub parts: Vec<(&'static str, u64)>,
}

impl PhaseMemory {
    fn new(phase: &'static str, parts: Vec<(&'static str, u64)>) -> Self {
        let parts: Vec<_> = parts.into_iter().filter(|(_, bytes)| *bytes > 0).collect();
        Self { phase, total: parts.iter().map(|(_, bytes)| bytes).sum(), parts }
    }
}

/// What memory depends on beside the model.
#[derive(Debug, Clone, Copy)]
pub(super) struct Load {
    /// L
    pub tokens: u64,
    /// `[f, h, w]`
    pub latents: [u64; 3],
    pub frames: u64,
    /// T
    pub text: TextLength,
    pub trained: Trained,
    /// Transitions that an iteration records.
    pub recorded: u64,
    /// Prompts that its micro-batches record, each for itself.
    pub recorded_prompts: u64,
    /// Samples that an update replays at once, and the velocities that differ among them.
    pub replayed: [u64; 2],
    /// Velocities whose graphs are kept from the rollouts until the first update is through.
    pub retained: u64,
    /// Whether the first latent frame is an image's, so that tokens have timesteps of their own.
    pub first_frame: bool,
    /// Prompts of an evaluation.
    pub eval_prompts: u64,
}

impl Load {
    /// Prompts of a micro-batch: in an evaluation all are different.
    fn prompts_at_once(&self, settings: &Settings) -> u64 {
        let rollout = &settings.rollout;
        (rollout.micro_batch as u64).min(self.eval_prompts.max(rollout.prompts_per_iteration as u64))
    }
}

/// All phases, in order.
pub(super) fn phases(settings: &Settings, model: &ModelSizes, load: &Load) -> Vec<PhaseMemory> {
    let resident = resident(settings, model, load);
    let with = |phase, more: Vec<(&'static str, u64)>| PhaseMemory::new(phase, [resident.clone(), more].concat());
    let samples = settings.rollout.micro_batch as u64;
    let rows = Rows::new(settings, load.tokens, [samples; 2], load.prompts_at_once(settings));
    let [samples, distinct] = load.replayed;
    let groups = samples.saturating_sub(1).div_ceil(settings.rollout.group_size as u64) + 1;
    let replayed = Rows::new(settings, load.tokens, [samples, distinct], groups.min(distinct));
    vec![
        PhaseMemory::new("text", text(model, &load.text)),
        with(
            "rollout",
            vec![
                ("text keys and values", rows.text(model, load)),
                ("timesteps of tokens", rows.timesteps(model, load, 1) + rows.modulation(model, load)),
                ("activations", rollout(model, load, &rows)),
                retained(model, load, &rows),
            ],
        ),
        with("decode", vec![("activations", decode(settings, model, load)), retained(model, load, &rows)]),
        with("update", update(settings, model, load, &replayed)),
    ]
}

/// What is kept outside of the device. On a CPU this comes on top of the phases.
///
/// ```text
/// an iteration      of every trained transition x and x', and v where the loss measures its change; of every micro-batch the prompts and what its videos
///                   start with; clips that are not scored yet
/// an evaluation     the clips that become videos at its end, and those that are being scored
/// both              the prompts
/// ```
pub(super) fn host(settings: &Settings, model: &ModelSizes, load: &Load) -> Vec<PhaseMemory> {
    let [frames, height, width] = load.latents;
    let latents = model.vae.z_dim as u64 * (frames - u64::from(load.first_frame)) * height * width;
    let tensors = 2 + u64::from(settings.loss().is_ok_and(|loss| loss.needs_change()));
    let (sampling, rollout) = (&settings.sampling, &settings.rollout);
    let shown = reward::leading_frames(&settings.reward, sampling.num_frames, sampling.fps);
    let clip = |frames: usize| F32 * (frames * sampling.height * sampling.width * 3) as u64;
    let samples = (rollout.prompts_per_iteration * rollout.group_size) as u64;
    let videos = (settings.eval.videos as u64).min(load.eval_prompts);
    let scored = rollout.micro_batch.min(decoded_at_once(settings)) as u64;
    let embeddings = |tokens: u64| F32 * tokens * model.transformer.text_dim as u64;
    let seen = model.image_encoder.as_ref().map_or(0, |encoder| F32 * (encoder.num_tokens() * encoder.hidden_size) as u64);
    let prompts = ("prompt embeddings", embeddings(load.text.tokens));
    vec![
        PhaseMemory::new(
            "an iteration",
            vec![
                ("recorded transitions", F32 * load.recorded * tensors * latents),
                ("prompts of recorded transitions", load.recorded_prompts * (embeddings(load.text.longest) + seen)),
                ("pictures of recorded transitions", F32 * load.recorded_prompts * first_frame(model, load)),
                ("clips that wait for rewards", (QUEUE_BYTES as u64).min(samples * clip(shown))),
                prompts,
            ],
        ),
        PhaseMemory::new(
            "an evaluation",
            vec![
                ("clips that become videos", videos * clip(sampling.num_frames)),
                ("clips that are scored", scored * clip(sampling.num_frames)),
                prompts,
            ],
        ),
    ]
}

/// What stays from the first rollout to the last update.
fn resident(settings: &Settings, model: &ModelSizes, load: &Load) -> Vec<(&'static str, u64)> {
    let state = if load.trained.full { STATE - 1 } else { STATE };
    // and the negative one
    let prompts = load.prompts_at_once(settings) + 1;
    vec![
        ("transformer", transformer(settings, &model.transformer)),
        ("second transformer", (model.networks() - 1) * transformer(settings, &model.transformer)),
        ("trained weights and their state", F32 * state * load.trained.parameters),
        ("autoencoder", F32 * wan::vae::num_parameters(&model.vae) as u64),
        ("image encoder", F32 * model.image_encoder.as_ref().map_or(0, |encoder| encoder.num_parameters() as u64)),
        ("first frames", F32 * (KEPT + settings.rollout.micro_batch) as u64 * first_frame(model, load)),
        ("prompt embeddings", F32 * prompts * load.text.longest * model.transformer.text_dim as u64),
    ]
}

/// What the networks of image-to-video know of a picture.
fn first_frame(model: &ModelSizes, load: &Load) -> u64 {
    let [frames, height, width] = load.latents;
    let channels_frames = match model.image_input {
        ImageInput::Channels => ImageCondition::num_channels(&model.vae) as u64 * frames,
        ImageInput::FirstFrame if load.first_frame => model.vae.z_dim as u64,
        ImageInput::FirstFrame | ImageInput::None => 0,
    };
    channels_frames * height * width
}

/// Copies of a trained weight: itself, the reference policy, two moments, the average, its gradient; and itself, both moments and the
/// average as they were before the iteration, to go back to if it fails. (Where all weights are trained, the first is the transformer.)
const STATE: u64 = 10;

/// One layer, twice while it is packed for a product, and the tokens of a group: input, norm, two hidden products.
fn text(model: &ModelSizes, text: &TextLength) -> Vec<(&'static str, u64)> {
    let config = &model.text_encoder;
    let tokens = if text.prompts == 0 { text.longest } else { text.tokens };
    let (dim, hidden) = (config.d_model as u64, config.d_ff as u64);
    let at_once = tokens.min(4096 + text.longest);
    vec![
        ("one layer of the text encoder", F32 * (config.num_layer_parameters() as u64 + dim * hidden)),
        ("activations", F32 * at_once * (3 * dim + 3 * hidden)),
    ]
}

/// How many rows go through the transformer at once, and how many graphs are alive.
struct Rows {
    /// Rows of one pass: samples whose velocities differ, both branches where they go together.
    batch: u64,
    /// Prompts of the samples.
    prompts: u64,
    /// Passes whose activations are kept until backward.
    passes: u64,
    /// Rows of a sample: 2 with guidance.
    branches: u64,
    /// Bytes of an activation between two operations.
    width: u64,
}

impl Rows {
    /// Of `samples` samples, among whose velocities `distinct` differ.
    fn new(settings: &Settings, tokens: u64, [samples, distinct]: [u64; 2], prompts: u64) -> Self {
        let width = narrow(settings);
        if settings.sampling.widest_guidance() == 1.0 {
            return Self { batch: distinct, prompts, passes: 1, branches: 1, width };
        }
        // as `replay` decides
        match GuidanceBatching::for_tokens((tokens * samples) as usize) {
            GuidanceBatching::Together => Self { batch: 2 * distinct, prompts, passes: 1, branches: 2, width },
            GuidanceBatching::InTurn => Self { batch: distinct, prompts, passes: 2, branches: 2, width },
        }
    }

    /// Keys and values of all blocks of every network: of the prompts and the negative one, and once more for every row of a pass.
    fn text(&self, model: &ModelSizes, load: &Load) -> u64 {
        let texts = self.prompts + (self.branches - 1);
        (texts + self.batch * self.passes) * model.networks() * self.text_of_row(model, load)
    }

    /// Of one row, in the blocks of one network.
    fn text_of_row(&self, model: &ModelSizes, load: &Load) -> u64 {
        let config = &model.transformer;
        2 * self.width * (load.text.longest + 1) * config.dim() as u64 * config.num_layers as u64
    }

    /// Where tokens have timesteps of their own: the embedding and its six projections, kept through `passes`.
    fn timesteps(&self, model: &ModelSizes, load: &Load, passes: u64) -> u64 {
        7 * passes * self.width * self.token_features(model, load)
    }

    /// The same: what a block adds its table to.
    fn modulation(&self, model: &ModelSizes, load: &Load) -> u64 {
        6 * F32 * self.token_features(model, load)
    }

    fn token_features(&self, model: &ModelSizes, load: &Load) -> u64 {
        if load.first_frame { self.batch * load.tokens * model.transformer.dim() as u64 } else { 0 }
    }
}

/// Scores of one chunk, f32.
fn scores(model: &ModelSizes, load: &Load, rows: &Rows) -> u64 {
    let tokens = load.tokens as usize;
    F32 * scores_at_once([rows.batch as usize, model.transformer.num_attention_heads, tokens, tokens]) as u64
}

/// The widest place of a block without a graph. The largest weight is packed meanwhile.
///
/// ```text
/// feed-forward      x, its norm, and two of size E                               2 D + 2 E
/// self-attention    x, q, k, its transpose, v, o; scores and probabilities       6 D + 2 chunks, but in bf16, where the kernel is a fused one
/// ```
fn rollout(model: &ModelSizes, load: &Load, rows: &Rows) -> u64 {
    let (d, e) = (model.transformer.dim() as u64, model.transformer.ffn_dim as u64);
    let tokens = rows.batch * load.tokens;
    let attention = if rows.width == F32 { F32 * tokens * 6 * d + 2 * scores(model, load, rows) } else { 0 };
    attention.max(F32 * tokens * (2 * d + 2 * e)) + F32 * d * e
}

/// What backward keeps of one block, per token.
///
/// ```text
/// norm input, queries and keys before their norm, q, k, v, attended       x n1 q' k' q k v o        8 D
/// cross-attention: norm input, normed, queries before norm, q, attended   x1 n2 q2' q2 o2           5 D
/// feed-forward: norm input, before GELU                                   x2 u                      1 D + 1 E
/// adapters (or all weights) in the feed-forward: normed, after GELU       n3 g                      1 D + 1 E
/// all weights: outputs of both gated branches                             h1 h2                     2 D
/// ```
pub(super) fn block_graph(d: u64, e: u64, trained: &Trained) -> u64 {
    let feed_forward = if trained.feed_forward { d + e } else { 0 };
    let gates = if trained.full { 2 * d } else { 0 };
    14 * d + e + feed_forward + gates
}

/// A place in the backward pass of a block, in bytes.
struct Place {
    /// What is left of its graph.
    graph: u64,
    /// Gradients of activations, and the largest weight while it is packed.
    gradients: u64,
    /// Of a chunk of attention.
    scores: u64,
}

impl Place {
    /// The wider of the two wide ones.
    ///
    /// ```text
    /// feed-forward      the whole graph; gradients of output and product, of the hidden tensors       3 D + 2 E
    /// self-attention    8 D of the graph; gradients of o, x, q, k, v; k and v transposed              7 D + 3 chunks: p, dp, ds
    /// ```
    fn widest(model: &ModelSizes, load: &Load, rows: &Rows) -> Self {
        let (d, e) = (model.transformer.dim() as u64, model.transformer.ffn_dim as u64);
        let of_tokens = |width: u64| F32 * rows.batch * load.tokens * width;
        let packed = F32 * d * e;
        let graph = of_tokens(block_graph(d, e, &load.trained));
        let feed_forward = Self { graph, gradients: of_tokens(3 * d + 2 * e) + packed, scores: 0 };
        let attention = Self { graph: of_tokens(8 * d), gradients: of_tokens(7 * d) + packed, scores: 3 * scores(model, load, rows) };
        if attention.total() > feed_forward.total() { attention } else { feed_forward }
    }

    fn total(&self) -> u64 {
        self.graph + self.gradients + self.scores
    }
}

/// Graphs of all blocks that the rollouts keep for the first update, with their text's keys and values.
fn retained(model: &ModelSizes, load: &Load, rows: &Rows) -> (&'static str, u64) {
    let config = &model.transformer;
    let [d, e, n] = [config.dim(), config.ffn_dim, config.num_layers].map(|x| x as u64);
    let row = n * F32 * load.tokens * block_graph(d, e, &load.trained) + rows.text_of_row(model, load);
    ("graphs kept for the first update", load.retained * rows.branches * row)
}

fn update(settings: &Settings, model: &ModelSizes, load: &Load, rows: &Rows) -> Vec<(&'static str, u64)> {
    let config = &model.transformer;
    let [d, e, n] = [config.dim(), config.ffn_dim, config.num_layers].map(|x| x as u64);
    let tokens = rows.batch * load.tokens;
    let block = F32 * tokens * block_graph(d, e, &load.trained);
    let Place { graph, gradients, scores } = Place::widest(model, load, rows);
    let backward = [("gradients of activations", gradients), ("scores of attention", scores)];
    let text = ("text keys and values", rows.text(model, load));
    let timesteps = rows.timesteps(model, load, rows.passes);
    if !settings.train.activation_checkpointing {
        let timesteps = ("timesteps of tokens", timesteps + rows.passes * n * rows.modulation(model, load));
        // the first update goes through graphs that are there, later ones through a micro-batch's at a time
        let (replayed, kept) = (rows.passes * n * block, retained(model, load, rows));
        let activations = if kept.1 > replayed { kept } else { ("activations", replayed) };
        let gone = block - graph;
        return [vec![text, timesteps, (activations.0, activations.1 - gone)], backward.to_vec()].concat();
    }
    let timesteps = ("timesteps of tokens", timesteps + rows.modulation(model, load));
    let own = ("gradients of this pass", F32 * load.trained.parameters / model.networks());
    let inputs = ("inputs of the blocks", rows.width * rows.passes * (n + 1) * tokens * d);
    [vec![text, timesteps, inputs, ("activations of one block", graph)], backward.to_vec(), vec![own]].concat()
}

/// Elements beyond which a clip is decoded in chunks of time (`AutoencoderKlWan::max_elements_per_pass`).
const MAX_ELEMENTS: u64 = 1 << 26;

/// The widest layer (its input with two frames of context; its output, twice, for devices join it of bands, and the scratch of a thread on a CPU is as
/// large; its block's input, what goes around its level), the frames that every convolution in time remembers between chunks, and the video; of the largest
/// tile, where frames are divided, and its neighbours' videos.
fn decode(settings: &Settings, model: &ModelSizes, load: &Load) -> u64 {
    let batch = settings.rollout.micro_batch.min(decoded_at_once(settings)) as u64;
    let tiles = tiles(&model.vae, settings.sampling.tiling(), load.latents);
    let pass = tiles.iter().map(|tile| decode_pass(&model.vae, load.frames, *tile, batch)).max().unwrap_or(0);
    if tiles.len() == 1 {
        return pass;
    }
    // tiles of two rows, and the frames that they are joined to
    let [_, h, w] = load.latents;
    pass + 2 * F32 * batch * load.frames * h * w * (model.vae.spatial_factor() as u64).pow(2) * 3
}

fn decode_pass(config: &VaeConfig, frames_of_clip: u64, [f, h, w]: [u64; 3], batch: u64) -> u64 {
    let places = h * w * ((config.spatial_factor() / config.patch()) as u64).pow(2);
    let per_latent_frame = batch * places * config.decoder_dim() as u64 * config.temporal_factor() as u64;
    let chunk = (MAX_ELEMENTS / per_latent_frame.max(1)).clamp(1, f);
    let chunked = chunk < f;
    let layers = DecoderLayer::all(config, [f, h, w]);
    // frames of a layer in one chunk, of `f` latent frames in all
    let frames = |layer: &DecoderLayer| (layer.frames * chunk).div_ceil(f);
    let width = |layer: &DecoderLayer| {
        let (frames, context) = (frames(layer), if chunked && layer.taps[0] > 1 { layer.taps[0] - 1 } else { 0 });
        let input = (frames + context) * layer.places / layer.enlarge * layer.inputs;
        let scores = if layer.attends { layer.places * layer.places } else { 0 };
        let output = frames * layer.places * layer.outputs;
        let kept = if layer.residual { output } else { 0 };
        input + 2 * output + frames * layer.around + kept + scores
    };
    let widest = layers.iter().map(width).max().unwrap_or(0);
    let context = |layer: &DecoderLayer| if layer.taps[0] > 1 { (layer.taps[0] - 1) * layer.places * layer.inputs } else { 0 };
    let remembered = if chunked { layers.iter().map(context).sum() } else { 0 };
    let video = 2 * frames_of_clip * places * config.out_channels as u64;
    F32 * batch * (widest + remembered + video)
}
