//! `flash-grpo sample`: one video from a prompt.

use crate::device::DeviceArg;
use crate::precision::PrecisionArg;
use crate::{outputs, progress};
use anyhow::{Result, bail, ensure};
use burn::tensor::{Device, Tensor, TensorData};
use clap::{Args, ValueEnum};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use train::first_frames::start;
use video::Frames;
use wan::clip::{ClipVisionConfig, IMAGE_ENCODER};
use wan::experts::{linear_sites, read_adapters};
use wan::image::StartImage;
use wan::pipeline::{Sample, SampleRequest, WanPipeline};
use wan::solver::SolverKind;
use wan::vae::Tiling;
use wan::weights::{WeightFiles, to_floats, write_safetensors};

/// Arguments of `sample`.
#[derive(Debug, Args)]
pub struct SampleArgs {
    /// Model folder in the diffusers layout.
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// What the video should show.
    #[arg(long)]
    prompt: String,
    /// What the video starts with, a PNG or JPEG file: for models of image-to-video. Of another size than the video, it is stretched.
    #[arg(long, value_name = "FILE")]
    image: Option<PathBuf>,
    /// What the video should not show; takes part if the guidance scale is above 1.
    #[arg(long, default_value = "")]
    negative_prompt: String,
    /// Adapter: a PEFT folder, a folder with `pytorch_lora_weights.safetensors`, or a .safetensors file of any usual layout.
    #[arg(long, value_name = "PATH")]
    lora: Option<PathBuf>,
    /// Adapter of the second transformer, in a model with two [default: the folder `transformer_2` in that of `--lora`, if there is one].
    #[arg(long, value_name = "PATH", requires = "lora")]
    lora_2: Option<PathBuf>,
    /// Denoising steps.
    #[arg(long, value_name = "N", default_value_t = 50)]
    num_inference_steps: usize,
    /// Weight of the prompt; 1 is no guidance.
    #[arg(long, value_name = "S", default_value_t = 5.0)]
    guidance_scale: f64,
    /// The same for the steps of the second transformer, in a model with two [default: the same].
    #[arg(long, value_name = "S")]
    guidance_scale_2: Option<f64>,
    /// Height in pixels.
    #[arg(long, value_name = "PIXELS", default_value_t = 480)]
    height: usize,
    /// Width in pixels.
    #[arg(long, value_name = "PIXELS", default_value_t = 832)]
    width: usize,
    /// Frames, 4k + 1.
    #[arg(long, value_name = "N", default_value_t = 81)]
    num_frames: usize,
    /// Solver [default: the model's own].
    #[arg(long)]
    solver: Option<SolverName>,
    /// Sigma grid [default: the model's own].
    #[arg(long)]
    grid: Option<GridName>,
    /// Shift of the sigmas [default: the model's own].
    #[arg(long)]
    shift: Option<f64>,
    /// Decode large frames in overlapping tiles: less memory, slightly another video.
    #[arg(long)]
    vae_tiling: bool,
    /// Tokens a prompt is cut and padded to.
    #[arg(long, value_name = "N", default_value_t = 512)]
    max_sequence_length: usize,
    /// Seed of the initial noise.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Initial latents instead of noise: a safetensors file with `latents` [1, C, F, H, W].
    #[arg(long, value_name = "FILE")]
    init_latents: Option<PathBuf>,
    /// Save the denoised latents: a safetensors file with `latents` [1, C, F, H, W].
    #[arg(long, value_name = "FILE")]
    save_latents: Option<PathBuf>,
    /// Save the frames without loss: a safetensors file with `frames` [1, F, H, W, 3] in [0, 1].
    #[arg(long, value_name = "FILE")]
    save_frames: Option<PathBuf>,
    /// Frames per second of the video file.
    #[arg(long, default_value_t = 16.0)]
    fps: f64,
    #[command(flatten)]
    precision: PrecisionArg,
    #[command(flatten)]
    device: DeviceArg,
    /// The video, .mp4 or .gif.
    #[arg(long, short, value_name = "FILE")]
    output: PathBuf,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum SolverName {
    /// Order 2, what Wan is sampled with
    Unipc,
    /// Order 1, what training rollouts use
    Euler,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum GridName {
    /// UniPC of diffusers up to 0.36, and of the original Wan code
    Unipc,
    /// UniPC since diffusers 0.37
    #[value(name = "unipc-0.37")]
    Unipc037,
    /// FlowMatchEulerDiscreteScheduler
    Euler,
}

impl SolverName {
    fn kind(self) -> SolverKind {
        match self {
            Self::Unipc => SolverKind::Unipc,
            Self::Euler => SolverKind::Euler,
        }
    }
}

impl GridName {
    fn grid(self) -> grpo::SigmaGrid {
        match self {
            Self::Unipc => grpo::SigmaGrid::Unipc,
            Self::Unipc037 => grpo::SigmaGrid::Unipc037,
            Self::Euler => grpo::SigmaGrid::Euler,
        }
    }
}

/// Samples one video and writes what was asked for.
///
/// # Errors
/// Bad input, or a file that cannot be written.
pub fn run(args: &SampleArgs) -> Result<()> {
    check_outputs(args)?;
    let model = wan::hub::resolve(&args.model)?;
    let request = request(args, &model)?;
    WanPipeline::check_request(&model, &request)?;
    let pipeline = load(args, &model)?;
    let bar = progress::bar("denoising", args.num_inference_steps);
    let sample = pipeline.sample(&request, &mut |done, total| {
        bar.set_length(total as u64);
        bar.set_position(done as u64);
    })?;
    bar.finish_and_clear();
    write(args, sample)
}

fn check_outputs(args: &SampleArgs) -> Result<()> {
    outputs::check_video(&args.output)?;
    for path in [&args.save_latents, &args.save_frames].into_iter().flatten() {
        outputs::check_file(path)?;
    }
    ensure!(
        args.fps > 0.0 && args.fps <= 1000.0,
        "fps is `{}`: it must be above 0 and at most 1000\nhint: Wan videos play at 16",
        args.fps
    );
    Ok(())
}

fn request(args: &SampleArgs, model: &Path) -> Result<SampleRequest> {
    Ok(SampleRequest {
        image: args.image.as_deref().map(|path| start_image(args, model, path)).transpose()?,
        prompt: args.prompt.clone(),
        negative_prompt: args.negative_prompt.clone(),
        height: args.height,
        width: args.width,
        num_frames: args.num_frames,
        num_inference_steps: args.num_inference_steps,
        guidance_scale: args.guidance_scale,
        guidance_scale_2: args.guidance_scale_2,
        solver: args.solver.map(SolverName::kind),
        grid: args.grid.map(GridName::grid),
        shift: args.shift,
        seed: args.seed,
        max_sequence_length: args.max_sequence_length,
        initial_latents: args.init_latents.as_deref().map(read_latents).transpose()?,
    })
}

/// A picture as the model wants it.
fn start_image(args: &SampleArgs, model: &Path, path: &Path) -> Result<StartImage> {
    let picture = video::Picture::read(path)?;
    let encoder = if model.join(IMAGE_ENCODER).is_dir() { Some(ClipVisionConfig::of_folder(model)?) } else { None };
    ensure!((1..=16384).contains(&args.height) && (1..=16384).contains(&args.width), "no video has {}x{} pixels", args.width, args.height);
    Ok(start(&picture, args.height, args.width, encoder.map(|encoder| encoder.image_size), &Device::flex()))
}

/// `latents` [1, C, F, H, W] of a safetensors file.
fn read_latents(path: &Path) -> Result<Tensor<5>> {
    let file = WeightFiles::open_file(path)?;
    let hint = "the file must hold one tensor `latents` [1, C, F, H, W], as --save-latents writes it";
    let values = file.floats("latents")?;
    let shape = file.shape("latents").unwrap_or_default();
    if shape.len() != 5 {
        bail!("`{}`: `latents` has shape {shape:?}\nhint: {hint}", path.display());
    }
    if values.iter().any(|value| !value.is_finite()) {
        bail!("`{}`: `latents` holds values that are not finite\nhint: {hint}", path.display());
    }
    Ok(Tensor::from_data(TensorData::new(values, shape), &Device::flex()))
}

/// The model with its adapter, if any; that is read first, because it is small.
fn load(args: &SampleArgs, model: &Path) -> Result<WanPipeline> {
    let adapters = match &args.lora {
        Some(path) => read_adapters(&linear_sites(model)?, path, args.lora_2.as_deref())?,
        None => Vec::new(),
    };
    let device = args.device.open()?;
    let spinner = progress::spinner("loading");
    let mut pipeline = WanPipeline::load(model, &device, args.precision.dtype())?;
    pipeline.vae.tiling = args.vae_tiling.then(Tiling::default);
    pipeline.experts().attach(adapters, &device)?;
    spinner.finish_and_clear();
    Ok(pipeline)
}

fn write(args: &SampleArgs, Sample { latents, frames }: Sample) -> Result<()> {
    let frames = frames.permute([0, 2, 3, 4, 1]);
    let [_, num_frames, height, width, _] = frames.dims();
    if let Some(path) = &args.save_latents {
        save(path, "latents", latents)?;
    }
    if let Some(path) = &args.save_frames {
        save(path, "frames", frames.clone())?;
    }
    let clip = Frames::new(num_frames, height, width, to_floats(frames))?;
    video::write(&args.output, &clip, args.fps)?;
    println!("wrote {} ({num_frames} frames of {width}x{height})", args.output.display());
    Ok(())
}

/// One tensor as a safetensors file.
fn save(path: &Path, name: &str, tensor: Tensor<5>) -> Result<()> {
    let shape = tensor.dims().to_vec();
    let tensors = BTreeMap::from([(name.to_owned(), (shape, to_floats(tensor)))]);
    Ok(write_safetensors(path, &tensors, None)?)
}
