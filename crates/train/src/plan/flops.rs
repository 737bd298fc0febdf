//! Floating-point operations: 2 per multiply-add of every matrix product and convolution; norms and activations are left out.
//!
//! Legend: `L` tokens of a sample, `T` text tokens, `D` features, `E` hidden features of the feed-forward, `N` blocks, `C` channels.

use serde::Serialize;
use wan::transformer::TransformerConfig;
use wan::umt5::Umt5Config;
use wan::vae::{Tiling, VaeConfig};

/// One pass of one sample through the transformer, without guidance.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ForwardFlops {
    /// Scores and weighted sums of self-attention: 4 L^2 D N.
    pub self_scores: f64,
    /// Its four projections: 8 L D^2 N.
    pub self_projections: f64,
    /// Feed-forward: 4 L D E N.
    pub feed_forward: f64,
    /// Cross-attention: (4 L D^2 + 4 L T D + 4 T D^2) N. The last term, keys and values, is computed once per rollout.
    pub cross: f64,
    /// The part of `cross` that is no matrix product with weights: 4 L T D N.
    pub cross_scores: f64,
    /// Patches, text and time embeddings, output.
    pub ends: f64,
}

impl ForwardFlops {
    /// Of `tokens` tokens and `text` text tokens.
    pub fn new(config: &TransformerConfig, tokens: u64, text: u64) -> Self {
        let [l, t] = [tokens, text].map(|n| n as f64);
        let [d, e, n] = [config.dim(), config.ffn_dim, config.num_layers].map(|n| n as f64);
        let patch = config.patch_size.iter().product::<usize>() as f64;
        let cross_scores = 4.0 * l * t * d * n;
        let (patches, channels) = (2.0 * l * d * patch, (config.in_channels + config.out_channels) as f64);
        let time = 2.0 * d * (config.freq_dim as f64 + 7.0 * d);
        Self {
            self_scores: 4.0 * l * l * d * n,
            self_projections: 8.0 * l * d * d * n,
            feed_forward: 4.0 * l * d * e * n,
            cross: (4.0 * l + 4.0 * t) * d * d * n + cross_scores,
            cross_scores,
            ends: patches * channels + 2.0 * t * d * (config.text_dim as f64 + d) + time,
        }
    }

    /// All of it.
    pub fn total(&self) -> f64 {
        self.self_scores + self.self_projections + self.feed_forward + self.cross + self.ends
    }

    /// Backward of one pass: products with weights once for the input, once more for the weights where those are trained; attention
    /// recomputes its scores and has four more products, 2.5 times its forward pass (Dao et al. 2022).
    pub fn backward(&self, full: bool) -> f64 {
        let scores = self.self_scores + self.cross_scores;
        let linear = self.total() - scores;
        2.5 * scores + if full { 2.0 * linear } else { linear }
    }
}

/// Decoding latents of `[f, h, w]` to video, in tiles where it is divided.
///
/// A convolution of C to O channels with K taps has 2 K C O for each place of its output.
pub fn decode(config: &VaeConfig, tiling: Option<Tiling>, latents: [u64; 3]) -> f64 {
    let of_tile = |tile: [u64; 3]| DecoderLayer::all(config, tile).iter().map(DecoderLayer::flops).sum::<f64>();
    tiles(config, tiling, latents).into_iter().map(of_tile).sum()
}

/// The latents that go through the decoder one after the other: all of them, or tiles.
pub(super) fn tiles(config: &VaeConfig, tiling: Option<Tiling>, [f, h, w]: [u64; 3]) -> Vec<[u64; 3]> {
    let tiles = tiling.map(|tiling| tiling.in_latents(config.spatial_factor())).filter(|tiles| tiles.divides(h as usize, w as usize));
    let Some(tiles) = tiles else { return vec![[f, h, w]] };
    tiles.tiles(h as usize, w as usize).into_iter().map(|(h, w)| [f, h as u64, w as u64]).collect()
}

/// A layer of the decoder, with the size of its output.
#[derive(Debug, Clone, Copy)]
pub(super) struct DecoderLayer {
    pub inputs: u64,
    pub outputs: u64,
    /// Taps in time and in a frame.
    pub taps: [u64; 2],
    /// Frames of the clip.
    pub frames: u64,
    /// Places of a frame.
    pub places: u64,
    /// Attention among the places of a frame, instead of a convolution.
    pub attends: bool,
    /// Adds its block's input to its output.
    pub residual: bool,
    /// How often its input's places are repeated.
    pub enlarge: u64,
    /// Values for each of its frames that go around its level meanwhile (Wan2.2).
    pub around: u64,
}

impl DecoderLayer {
    fn flops(&self) -> f64 {
        let outputs = (self.frames * self.places * self.outputs) as f64;
        if self.attends {
            return 4.0 * self.places as f64 * outputs;
        }
        2.0 * (self.taps[0] * self.taps[1] * self.inputs) as f64 * outputs
    }

    /// All layers, from latents to video (`wan::vae`).
    pub fn all(config: &VaeConfig, [f, h, w]: [u64; 3]) -> Vec<Self> {
        let base = config.decoder_dim() as u64;
        let dims: Vec<u64> = config.dim_mult.iter().map(|mult| base * *mult as u64).collect();
        let lowest = dims[dims.len() - 1];
        let mut layers = Layers { list: Vec::new(), frames: f, places: h * w, around: 0 };
        layers.conv(config.z_dim as u64, config.z_dim as u64, [1, 1]);
        layers.conv(config.z_dim as u64, lowest, [3, 9]);
        layers.residual(lowest, lowest);
        layers.conv(lowest, 3 * lowest, [1, 1]);
        layers.push(DecoderLayer { attends: true, ..layers.layer(lowest, lowest, [1, 1]) });
        layers.conv(lowest, lowest, [1, 1]);
        layers.residual(lowest, lowest);
        let mut channels = lowest;
        for level in (0..dims.len()).rev() {
            let doubles_time = level > 0 && config.temperal_downsample[level - 1];
            layers.around =
                if config.is_residual && level > 0 { layers.places * 4 * dims[level] * (1 + u64::from(doubles_time)) } else { 0 };
            for _ in 0..=config.num_res_blocks {
                layers.residual(channels, dims[level]);
                channels = dims[level];
            }
            if level > 0 {
                let outputs = config.upsampled(channels);
                layers.upsample(channels, outputs, doubles_time);
                channels = outputs;
            }
        }
        layers.conv(channels, config.out_channels as u64, [3, 9]);
        layers.list
    }
}

struct Layers {
    list: Vec<DecoderLayer>,
    frames: u64,
    places: u64,
    around: u64,
}

impl Layers {
    fn layer(&self, inputs: u64, outputs: u64, taps: [u64; 2]) -> DecoderLayer {
        let Self { frames, places, around, .. } = *self;
        DecoderLayer { inputs, outputs, taps, frames, places, attends: false, residual: false, enlarge: 1, around }
    }

    fn push(&mut self, layer: DecoderLayer) {
        self.list.push(layer);
    }

    fn conv(&mut self, inputs: u64, outputs: u64, taps: [u64; 2]) {
        self.push(self.layer(inputs, outputs, taps));
    }

    fn residual(&mut self, inputs: u64, outputs: u64) {
        if inputs != outputs {
            self.conv(inputs, outputs, [1, 1]);
        }
        for inputs in [inputs, outputs] {
            self.push(DecoderLayer { residual: true, ..self.layer(inputs, outputs, [3, 9]) });
        }
    }

    fn upsample(&mut self, channels: u64, outputs: u64, doubles_time: bool) {
        if doubles_time && self.frames > 1 {
            // the first frame stays one
            self.push(DecoderLayer { frames: self.frames - 1, ..self.layer(channels, 2 * channels, [3, 1]) });
            self.frames = 2 * self.frames - 1;
            self.around /= 2;
        }
        self.places *= 4;
        self.push(DecoderLayer { enlarge: 4, ..self.layer(channels, outputs, [1, 9]) });
    }
}

/// Encoding prompts of `tokens` tokens in all, the longest of `longest`: projections, gated feed-forward, scores.
pub fn encode_text(config: &Umt5Config, tokens: u64, longest: u64) -> f64 {
    let (tokens, longest) = (tokens as f64, longest as f64);
    let inner = (config.num_heads * config.d_kv) as f64;
    let weights = 4.0 * config.d_model as f64 * inner + 3.0 * config.d_model as f64 * config.d_ff as f64;
    config.num_layers as f64 * tokens * (2.0 * weights + 4.0 * longest * inner)
}
