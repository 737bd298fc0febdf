//! The parts of the transformer against the reference, tensor by tensor; the whole is tested in `tests/transformer.rs`.

use super::block::gated_sum;
use super::rope::Rope;
use super::*;
use crate::layers::layer_norm;
use crate::weights::to_floats;
use std::path::PathBuf;

/// max|a-b| / max|reference| (golden/README.md)
const TOLERANCE: f64 = 5e-6;

struct Golden(WeightFiles);

impl Golden {
    fn open(name: &str) -> Self {
        Self(WeightFiles::open_file(&folder().join(format!("{name}.safetensors"))).expect("golden file"))
    }

    fn tensor<const D: usize>(&self, name: &str) -> Tensor<D> {
        let shape = self.0.shape(name).unwrap_or_else(|| panic!("no golden tensor {name}"));
        Tensor::from_data(TensorData::new(self.0.floats(name).expect("floats"), shape), &Device::flex())
    }

    /// Compares elements in order; shapes may differ by axes of size 1.
    #[track_caller]
    fn check<const D: usize>(&self, name: &str, ours: &Tensor<D>) {
        let (ours, reference) = (to_floats(ours.clone()), self.0.floats(name).expect("floats"));
        assert_eq!(ours.len(), reference.len(), "{name}");
        let largest = reference.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
        let worst = ours.iter().zip(&reference).fold(0.0_f32, |m, (a, b)| m.max((a - b).abs()));
        let error = f64::from(worst / largest);
        assert!(error <= TOLERANCE && ours.iter().all(|v| v.is_finite()), "{name}: relative error {error:e}");
    }
}

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../golden")
}

fn tiny() -> WanTransformer {
    WanTransformer::load(&folder().join("wan-tiny/transformer"), &Device::flex(), DType::F32).expect("wan-tiny")
}

/// Case b of `transformer_forward`: two samples of 3x2x3 patches, 16 rows of text.
struct Case {
    model: WanTransformer,
    reference: Golden,
    rope: Rope,
    grid: PatchGrid,
    /// Patch embedding [B, L, D].
    hidden: Tensor<3>,
    temb: Tensor<3>,
    modulation: Tensor<4>,
    text: TextContext,
    rows: Tensor<3>,
}

impl Case {
    fn new() -> Self {
        let (model, inputs, reference) = (tiny(), Golden::open("transformer_forward"), Golden::open("transformer_intermediates"));
        let latents: Tensor<5> = inputs.tensor("b.hidden_states");
        let grid = PatchGrid::new(&model.config, latents.dims());
        let rope = Rope::new(&model.config, &grid, &Device::flex());
        let hidden = model.patch_embedding.forward(grid.patchify(latents));
        // the reference's own sinusoids: see `reference_sinusoids` in tests/transformer.rs
        let sinusoids: Tensor<3> = reference.tensor::<2>("timesteps_proj").unsqueeze_dim(1);
        let (temb, modulation) = model.time.forward(sinusoids, DType::F32);
        let rows: Tensor<3> = inputs.tensor("b.encoder_hidden_states");
        let text = model.text_context(&PromptEmbeds::from_padded(rows.clone()), false);
        Self { model, reference, rope, grid, hidden, temb, modulation, text, rows }
    }

    fn block(&self, index: usize, x: Tensor<3>) -> Tensor<3> {
        self.model.blocks[index].forward(x, &self.modulation, &self.rope, &self.text.blocks[index], self.text.bias.as_ref())
    }
}

#[test]
fn matches_reference_transformer_intermediates_of_the_inputs() {
    let case = Case::new();
    let (cos, sin) = case.rope.tables();
    case.reference.check("rope.0", &cos);
    case.reference.check("rope.1", &sin);
    // the reference's convolution has the channels in front of the places
    case.reference.check("patch_embedding", &case.hidden.clone().swap_dims(1, 2));
    case.reference.check("time_embedder", &case.temb);
    case.reference.check("condition_embedder.0", &case.temb);
    case.reference.check("condition_embedder.1", &case.modulation);
    let embedded = case.model.text_2.forward(gelu_tanh(case.model.text_1.forward(case.rows.clone())));
    case.reference.check("condition_embedder.2", &embedded);
}

#[test]
fn matches_reference_transformer_intermediates_of_a_block() {
    let case = Case::new();
    let (block, x) = (&case.model.blocks[0], case.hidden.clone());
    let [shift_1, scale_1, gate_1, shift_2, scale_2, gate_2] = block.modulation(&x, &case.modulation);

    case.reference.check("block0.norm1", &layer_norm(x.clone(), case.model.config.eps));
    let normed = block.modulated_norm(&x, shift_1, scale_1);
    case.reference.check("block0.attn1.to_q", &block.attn1.to_q.forward(normed.clone()));
    let queries = block.attn1.queries(normed.clone(), None);
    case.reference.check("block0.attn1.norm_q", &queries);
    case.reference.check("block0.attn1.norm_k", &block.attn1.keys(normed.clone(), None));
    case.reference.check("own.block0.attn1.q_rotated", &block.attn1.queries(normed.clone(), Some(&case.rope)));
    let attended = block.self_attention(normed, &case.rope);
    case.reference.check("block0.attn1", &attended);
    let x = gated_sum(x, attended, gate_1);

    let normed = block.affine_norm(&x);
    case.reference.check("block0.norm2", &normed);
    let attended = block.cross_attention(normed, &case.text.blocks[0], case.text.bias.as_ref());
    case.reference.check("block0.attn2", &attended);
    let x = x + attended;

    case.reference.check("block0.norm3", &layer_norm(x.clone(), case.model.config.eps));
    let fed = block.feed_forward(block.modulated_norm(&x, shift_2, scale_2));
    case.reference.check("block0.ffn", &fed);
    case.reference.check("block0", &gated_sum(x, fed, gate_2));
}

#[test]
fn matches_reference_transformer_intermediates_of_the_whole() {
    let case = Case::new();
    let x = case.block(0, case.hidden.clone());
    case.reference.check("block0", &x);
    let x = case.block(1, x);
    case.reference.check("block1", &x);
    case.reference.check("norm_out", &layer_norm(x.clone(), case.model.config.eps));
    let projected = case.model.head(x, &case.temb);
    case.reference.check("proj_out", &projected);
    case.reference.check("sample", &case.grid.unpatchify(projected));
}

#[test]
fn every_intermediate_is_compared() {
    let source = include_str!("tests.rs");
    let reference = Golden::open("transformer_intermediates");
    let elsewhere = ["a.sample_float64", "b.sample_float64", "c.sample_float64"]; // tests/transformer.rs
    for name in reference.0.names().filter(|name| !elsewhere.contains(name)) {
        assert!(source.contains(&format!("\"{name}\"")), "{name} is not compared");
    }
}
