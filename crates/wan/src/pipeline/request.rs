//! What to sample, and whether a model can.

use super::{SchedulerConfig, initial_noise, sample_key};
use crate::clip::ClipVisionConfig;
use crate::error::{Error, Result};
use crate::guidance::GuidanceScales;
use crate::image::{ImageInput, StartImage};
use crate::solver::SolverKind;
use crate::transformer::TransformerConfig;
use crate::vae::VaeConfig;
use burn::tensor::{Device, Tensor};
use grpo::{Schedule, SigmaGrid};

/// A video to make. The defaults are those of diffusers' `WanPipeline`.
#[derive(Debug, Clone)]
pub struct SampleRequest {
    /// What the video should show.
    pub prompt: String,
    /// What it should not show.
    pub negative_prompt: String,
    /// Height in pixels.
    pub height: usize,
    /// Width in pixels.
    pub width: usize,
    /// What the video starts with: one, for models of image-to-video, and no others.
    pub image: Option<StartImage>,
    /// Frames, 4k + 1 for Wan2.1.
    pub num_frames: usize,
    /// Denoising steps.
    pub num_inference_steps: usize,
    /// Weight of the prompt against the negative prompt; 1 is no guidance.
    pub guidance_scale: f64,
    /// That of the second network; if absent, the same. Only for a model with two.
    pub guidance_scale_2: Option<f64>,
    /// Solver, if not the model's own.
    pub solver: Option<SolverKind>,
    /// Sigma grid, if not the model's own.
    pub grid: Option<SigmaGrid>,
    /// Shift of the sigmas, if not the model's own.
    pub shift: Option<f64>,
    /// Seed of the initial noise.
    pub seed: u64,
    /// Tokens a prompt is cut and padded to.
    pub max_sequence_length: usize,
    /// Initial latents [1, C, f, h, w] instead of noise drawn from the seed.
    pub initial_latents: Option<Tensor<5>>,
}

impl Default for SampleRequest {
    fn default() -> Self {
        Self {
            prompt: String::new(),
            negative_prompt: String::new(),
            height: 480,
            width: 832,
            image: None,
            num_frames: 81,
            num_inference_steps: 50,
            guidance_scale: 5.0,
            guidance_scale_2: None,
            solver: None,
            grid: None,
            shift: None,
            seed: 0,
            max_sequence_length: 512,
            initial_latents: None,
        }
    }
}

impl SampleRequest {
    /// Whether the negative prompt takes part.
    pub fn has_guidance(&self) -> bool {
        self.guidance() != GuidanceScales::from(1.0)
    }

    /// The scales of both networks.
    pub(super) fn guidance(&self) -> GuidanceScales {
        GuidanceScales::new(self.guidance_scale, self.guidance_scale_2)
    }

    /// Whether the model, which has a second network or not, has a use for every scale.
    ///
    /// # Errors
    /// A scale for a network that is not there.
    pub(super) fn check_guidance(&self, has_second: bool) -> Result<()> {
        match self.guidance_scale_2.filter(|_| !has_second) {
            Some(scale) => Err(argument(
                "guidance_scale_2",
                scale,
                "the model has one transformer",
                "leave it out; `guidance_scale` is that of every step",
            )),
            None => Ok(()),
        }
    }

    /// Checks the request against the sizes of a model; returns the shape of the latents [1, C, f, h, w].
    ///
    /// # Errors
    /// The first setting that cannot be used, with the nearest one that can.
    pub fn check(&self, transformer: &TransformerConfig, vae: &VaeConfig) -> Result<[usize; 5]> {
        check_text("prompt", &self.prompt)?;
        check_text("negative_prompt", &self.negative_prompt)?;
        let [patch_frames, patch_height, patch_width] = transformer.patch_size;
        let (space, time, reach) = (vae.spatial_factor(), vae.temporal_factor(), transformer.rope_max_seq_len);
        check_multiple("height", self.height, space * patch_height, reach)?;
        check_multiple("width", self.width, space * patch_width, reach)?;
        check_frames(self.num_frames, time, patch_frames, reach)?;
        if self.max_sequence_length == 0 {
            return Err(argument("max_sequence_length", 0, "a prompt has at least one token", "the usual value is 512"));
        }
        let scales = [("guidance_scale", Some(self.guidance_scale)), ("guidance_scale_2", self.guidance_scale_2)];
        for (name, scale) in scales.into_iter().filter_map(|(name, scale)| Some((name, scale?))) {
            if !(scale.is_finite() && scale >= 1.0) {
                return Err(argument(name, scale, "it must be a number from 1 up", "1 is no guidance; Wan is usually sampled with 5"));
            }
        }
        Ok([1, transformer.out_channels, vae.latent_frames(self.num_frames), self.height / space, self.width / space])
    }

    /// The image, if the model starts with one.
    ///
    /// # Errors
    /// An image that is absent, has another size than the video or the encoder's images, or that the model cannot use; a video that ends with it.
    pub(super) fn image(&self, input: ImageInput, encoder: Option<&ClipVisionConfig>, device: &Device) -> Result<Option<StartImage>> {
        match (&self.image, input) {
            (None, ImageInput::Channels) => {
                Err(argument("image", "absent", "the model makes videos of images", "give the first frame of the video"))
            }
            (Some(_), ImageInput::None) => {
                Err(argument("image", "given", "the model makes videos of text alone", "leave it out, or use a model of image-to-video"))
            }
            (None, _) => Ok(None),
            (Some(_), ImageInput::FirstFrame) if self.num_frames == 1 => {
                Err(argument("num_frames", 1, "the image is the first frame already", "choose at least 5"))
            }
            (Some(image), _) => {
                let fits = |size: [usize; 2], image: &Tensor<4>| match (vec![1, 3, size[0], size[1]], image.dims()) {
                    (expected, got) if expected == got => Ok(image.clone().inner().to_device(&device.clone().inner())),
                    (expected, got) => Err(argument("image", format!("{got:?}"), &format!("expected one of {expected:?}"), "resize it")),
                };
                let square = match (encoder, &image.square) {
                    (Some(encoder), Some(square)) => Some(fits([encoder.image_size; 2], square)?),
                    (Some(_), None) => {
                        return Err(argument(
                            "image",
                            "of the video's size alone",
                            "the model has an image encoder",
                            "give it a square, too",
                        ));
                    }
                    (None, _) => None,
                };
                Ok(Some(StartImage { frame: fits([self.height, self.width], &image.frame)?, square }))
            }
        }
    }

    /// The schedule: the model's, where the request does not say otherwise.
    ///
    /// # Errors
    /// A number of steps or a shift out of range.
    pub fn schedule(&self, model: &SchedulerConfig) -> Result<Schedule> {
        let (grid, shift) = (self.grid.unwrap_or(model.grid), self.shift.unwrap_or(model.shift));
        Schedule::new(grid, self.num_inference_steps, shift).map_err(|error| match &error {
            grpo::Error::OutOfRange { field, got, expected, hint } => argument(field, got, &format!("expected {expected}"), hint),
            _ => argument("num_inference_steps", self.num_inference_steps, &error.to_string(), error.hint()),
        })
    }

    /// Whether given latents are those of such a video.
    ///
    /// # Errors
    /// Given latents of another shape.
    pub(super) fn check_start(&self, shape: [usize; 5]) -> Result<()> {
        let Some(latents) = self.initial_latents.as_ref().filter(|latents| latents.dims() != shape) else { return Ok(()) };
        let (value, reason) = (format!("{:?}", latents.dims()), format!("this video has latents of shape {shape:?}"));
        Err(argument("initial_latents", value, &reason, "check height, width and num_frames against the latents"))
    }

    /// The latents to start from.
    ///
    /// # Errors
    /// As [`check_start`](Self::check_start).
    pub(super) fn start(&self, shape: [usize; 5], device: &Device) -> Result<Tensor<5>> {
        self.check_start(shape)?;
        Ok(match &self.initial_latents {
            Some(latents) => latents.clone().inner().to_device(&device.clone().inner()),
            None => initial_noise(&sample_key(self.seed), shape, device),
        })
    }
}

/// Control characters in a prompt come from a broken file or terminal; line ends and tabs count as blanks.
fn check_text(field: &'static str, text: &str) -> Result<()> {
    let is_bad = |c: char| c.is_control() && !matches!(c, '\n' | '\r' | '\t');
    let Some((place, c)) = text.chars().enumerate().find(|&(_, c)| is_bad(c)) else { return Ok(()) };
    let shown: String = text.chars().take(MAX_SHOWN).collect::<String>().escape_debug().collect();
    let reason = format!("character {} is the control character U+{:04X}", place + 1, u32::from(c));
    Err(argument(field, shown, &reason, "remove it; was the text copied from a terminal or a binary file?"))
}

/// Characters of a refused prompt that a message shows.
const MAX_SHOWN: usize = 60;

/// `reach` is the number of patches that the rotary table of the model covers on an axis.
fn check_multiple(field: &'static str, size: usize, unit: usize, reach: usize) -> Result<()> {
    if size > unit * reach {
        return Err(argument(field, size, &format!("the model reaches up to {}", unit * reach), "choose a smaller size"));
    }
    if size > 0 && size.is_multiple_of(unit) {
        return Ok(());
    }
    let reason = format!("it must be a positive multiple of {unit} (autoencoder scale x patch)");
    Err(argument(field, size, &reason, &format!("try {}", size.div_ceil(unit).max(1) * unit)))
}

/// The first frame stands alone, then `time` frames make one latent frame; latent frames must fill whole patches.
fn check_frames(frames: usize, time: usize, patch: usize, reach: usize) -> Result<()> {
    let most = 1 + (patch * reach - 1) * time;
    if frames > most {
        return Err(argument("num_frames", frames, &format!("the model reaches up to {most}"), "choose a shorter video"));
    }
    let fits = |frames: usize| (frames - 1).is_multiple_of(time) && ((frames - 1) / time + 1).is_multiple_of(patch);
    if frames > 0 && fits(frames) {
        return Ok(());
    }
    let nearest = (frames.max(1)..=most).find(|&more| fits(more)).unwrap_or(most);
    Err(argument("num_frames", frames, &format!("it must be {time}k + 1"), &format!("try {nearest}")))
}

fn argument(field: &'static str, value: impl ToString, reason: &str, hint: &str) -> Error {
    Error::Argument { field, value: value.to_string(), reason: reason.into(), hint: hint.into() }
}
