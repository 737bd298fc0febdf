//! Stage 2: text encoder and transformer, by flow matching.

use super::Progress;
use super::data::{Latents, key, uniform};
use super::settings::PretrainSettings;
use burn::tensor::{DType, Device, Tensor, TensorData};
use std::path::Path;
use wan::error::Result;
use wan::param::ParamSet;
use wan::text::{PromptTokenizer, TextEncoder, WORD_TOKENIZER_CONFIG_JSON, word_tokenizer_json, word_tokenizer_vocab_size};
use wan::transformer::WanTransformer;
use wan::umt5::Umt5Encoder;
use wan::weights::{Weights, write_atomically, write_params};

/// Longest caption in tokens while training; the shorter, the faster.
const MAX_TOKENS: usize = 16;
/// The length to which the pipeline pads a prompt.
const PADDED_LENGTH: usize = 512;

/// The two networks of this stage.
pub(super) struct FlowModel {
    text_encoder: TextEncoder,
    transformer: WanTransformer,
    tokenizer_json: String,
}

impl FlowModel {
    fn new(settings: &PretrainSettings, device: &Device) -> Result<Self> {
        let words = settings.data.world.vocabulary();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let tokenizer_json = word_tokenizer_json(&words);
        let tokenizer = PromptTokenizer::from_json(&tokenizer_json, Path::new("tokenizer.json"))?;
        let mut config = settings.text_encoder.clone();
        config.vocab_size = word_tokenizer_vocab_size(&words);
        let encoder = Umt5Encoder::new(config, &Weights::random(settings.seed, device))?;
        let weights = Weights::random(settings.seed, device);
        let transformer = WanTransformer::new(settings.flow.config.clone(), weights, DType::F32)?;
        Ok(Self { text_encoder: TextEncoder::new(tokenizer, encoder)?, transformer, tokenizer_json })
    }

    fn params(&self) -> ParamSet {
        let (text, transformer) = (self.text_encoder.encoder.params.iter(), self.transformer.params.iter());
        ParamSet::new(text.chain(transformer).cloned().collect())
    }

    /// `mean (v(x_t, t, caption) - (x1 - x0))^2`, x_t = (1 - sigma) x0 + sigma x1, sigma uniform and then shifted.
    fn loss(&self, settings: &PretrainSettings, latents: &Latents, step: usize, device: &Device) -> Tensor<1> {
        let (x0, captions) = latents.batch(settings, step, device);
        let size = x0.dims()[0];
        let noise_key = key(settings.seed, 102, step);
        let noise = noise_key.normals(x0.shape().num_elements());
        let x1: Tensor<5> = Tensor::from_data(TensorData::new(noise, x0.dims()), device);
        let mut rng = key(settings.seed, 103, step).rng();
        let shift = settings.shift;
        let sigmas: Vec<f64> = (0..size).map(|_| uniform(&mut rng)).map(|u| shift * u / (1.0 + (shift - 1.0) * u)).collect();
        let column: Vec<f32> = sigmas.iter().map(|&s| s as f32).collect();
        let sigma: Tensor<5> = Tensor::from_data(TensorData::new(column, [size, 1, 1, 1, 1]), device);
        let xt = x0.clone() + (x1.clone() - x0.clone()) * sigma;
        let timesteps: Vec<f64> = sigmas.iter().map(|s| 1000.0 * s).collect();
        let captions: Vec<&str> = captions.iter().map(String::as_str).collect();
        let mut text = match self.text_encoder.encode_recorded(&captions, MAX_TOKENS) {
            Ok(text) => text,
            Err(error) => panic!("captions of the demo worlds always encode: {error}"),
        };
        text.padded_length = PADDED_LENGTH;
        let velocity = self.transformer.forward(xt.autodiff(), &timesteps, &self.transformer.text_context(&text, true));
        (velocity - (x1 - x0).autodiff()).powi_scalar(2).mean()
    }

    /// Writes transformer/, text_encoder/ and tokenizer/.
    pub(super) fn save(&self, dir: &Path) -> Result<()> {
        let write = |path: &str, text: &str| write_atomically(&dir.join(path), text.as_bytes());
        write("tokenizer/tokenizer.json", &self.tokenizer_json)?;
        write("tokenizer/tokenizer_config.json", WORD_TOKENIZER_CONFIG_JSON)?;
        write("text_encoder/config.json", &self.text_encoder.encoder.config.to_json())?;
        write_params(&dir.join("text_encoder/model.safetensors"), &self.text_encoder.encoder.params)?;
        write("transformer/config.json", &self.transformer.config.to_json())?;
        write_params(&dir.join("transformer/diffusion_pytorch_model.safetensors"), &self.transformer.params)
    }
}

/// Trains, or continues, text encoder and transformer.
pub(super) fn train(
    settings: &PretrainSettings,
    latents: &Latents,
    work: &Path,
    device: &Device,
    report: &mut dyn FnMut(Progress),
) -> Result<FlowModel> {
    let model = FlowModel::new(settings, device)?;
    let mut loss_of = |step: usize| model.loss(settings, latents, step, device);
    super::stage::run("flow", &settings.flow, &model.params(), work, report, &mut loss_of)?;
    Ok(model)
}
