//! Activation checkpointing by block (Chen et al. 2016, "Training deep nets with sublinear memory cost").
//!
//! ```text
//! forward    no graph; x_i, what block i starts from, is kept
//! backward   head, blocks N-1 .. 0, embeddings: each is computed again with a graph from x_i, and takes the gradient of its output
//! ```
//!
//! Memory is N x_i and the graph of one block, instead of the graphs of N blocks; the price is one more forward pass. On the CPU in f32 the
//! gradients are bit for bit those of the plain graph: a block's operations are the same, and where several parts use one
//! tensor, the contributions are added in the order in which the engine adds them (see `Branch::backward_start`).
//!
//! Legend: `B` batch, `L` tokens, `D` features, `T` text tokens, `S` = 1 or L, `N` blocks.

use super::block::{Block, KeyValues, TextKv};
use super::patch::PatchGrid;
use super::rope::Rope;
use super::{Embedded, TextContext, WanTransformer, text_rows, time};
use crate::layers::cast;
use burn::tensor::{DType, Gradients, Tensor};

/// A forward pass of which only the inputs of the blocks were kept.
#[derive(Debug)]
pub struct Trace {
    latents: Tensor<5>,
    sinusoids: Tensor<3>,
    text: TextContext,
    /// What each block and the head start from [B, L, D].
    inputs: Vec<Tensor<3>>,
    /// [B, S, D]
    temb: Tensor<3>,
    /// [B, S, 6, D]
    modulation: Tensor<4>,
}

/// Called with the gradients of one part of the network after another; a weight may be in several of them.
pub type Receive<'a> = &'a mut dyn FnMut(&Gradients);

impl WanTransformer {
    /// As [`forward`](WanTransformer::forward), without a graph, but with what [`backward_traced`](Self::backward_traced) needs to
    /// compute one later. `latents` and `text` are plain tensors.
    pub fn forward_traced(&self, latents: Tensor<5>, timesteps: &[f64], text: &TextContext) -> (Tensor<5>, Trace) {
        let sinusoids = time::sinusoids(timesteps, latents.dims()[0], self.config.freq_dim, &latents.device());
        let grid = PatchGrid::new(&self.config, latents.dims());
        let rope = Rope::new(&self.config, &grid, &latents.device());
        let Embedded { hidden, temb, modulation } = self.embed(latents.clone(), sinusoids.clone(), &grid);
        let mut inputs = vec![hidden.clone()];
        let mut hidden = hidden;
        for (block, kv) in self.blocks.iter().zip(&text.blocks) {
            hidden = block.forward(hidden, &modulation, &rope, kv, text.bias.as_ref());
            inputs.push(hidden.clone());
        }
        let velocity = grid.unpatchify(cast(self.head(hidden, &temb), DType::F32));
        (velocity, Trace { latents, sinusoids, text: text.clone(), inputs, temb, modulation })
    }

    /// Backward through forward passes over the same text, each with the gradient of its velocity.
    ///
    /// # Panics
    /// If there is no pass, or one is of another network.
    pub fn backward_traced(&self, passes: Vec<(Trace, Tensor<5>)>, receive: Receive<'_>) {
        let context = &passes.first().expect("at least one pass").0.text;
        let (rows, bias) = text_rows(&context.prompts);
        let embedded_text = self.embed_text(rows.autodiff());
        let embedded_image = context.images.clone().map(|images| self.embed_image(images.autodiff()));
        let mut branches: Vec<Branch> = passes.into_iter().map(|(trace, gradient)| Branch::new(self, trace, &gradient, receive)).collect();
        let (mut text_gradient, mut image_gradient) = (None, None);
        for block in self.blocks.iter().rev() {
            let text = Attended::new(&embedded_text, |inputs| block.text_keys_values(inputs));
            let image = embedded_image.as_ref().map(|image| Attended::new(image, |inputs| block.image_keys_values(inputs)));
            let attended = (&text, image.as_ref());
            let (of_text, of_image): (Vec<_>, Vec<_>) =
                branches.iter_mut().map(|branch| branch.backward_block(block, attended, bias.as_ref(), receive)).unzip();
            text.backward(of_text, &mut text_gradient, receive);
            if let Some(image) = image {
                image.backward(of_image.into_iter().flatten().collect(), &mut image_gradient, receive);
            }
        }
        for branch in branches {
            branch.backward_start(self, receive);
        }
        let ends = [weighted(&embedded_text, text_gradient), embedded_image.and_then(|image| weighted(&image, image_gradient))];
        for product in ends.into_iter().flatten() {
            receive(&product.backward());
        }
    }
}

/// Backward through one pass, from the head down.
struct Branch {
    trace: Trace,
    rope: Rope,
    /// What of the start leads to trained weights: tokens, temb, modulation.
    tracked: [bool; 3],
    /// Gradient of the input of the part that was last gone through.
    hidden: Option<Tensor<3>>,
    /// Gradients of temb as the head's shift and as its scale.
    temb: [Option<Tensor<3>>; 2],
    modulation: Option<Tensor<4>>,
}

impl Branch {
    /// Goes through the head.
    fn new(model: &WanTransformer, mut trace: Trace, gradient: &Tensor<5>, receive: Receive<'_>) -> Self {
        let grid = PatchGrid::new(&model.config, trace.latents.dims());
        let rope = Rope::new(&model.config, &grid, &trace.latents.device());
        let start = model.embed(trace.latents.clone().autodiff(), trace.sinusoids.clone(), &grid);
        let tracked = [start.hidden.is_tracked(), start.temb.is_tracked(), start.modulation.is_tracked()];
        let hidden = leaf(trace.inputs.pop().expect("what the head starts from"), true);
        let [shift, scale] = [0, 1].map(|_| leaf(trace.temb.clone(), tracked[1]));
        let velocity = grid.unpatchify(cast(model.head_of(hidden.clone(), [&shift, &scale]), DType::F32));
        let gradients = (velocity * gradient.clone()).sum().backward();
        receive(&gradients);
        let (hidden, temb) = (hidden.grad(&gradients), [shift.grad(&gradients), scale.grad(&gradients)]);
        Self { trace, rope, tracked, hidden, temb, modulation: None }
    }

    /// Goes through a block; returns the gradients of the keys and values of the text, and of the image, if there is one.
    fn backward_block(
        &mut self,
        block: &Block,
        (text, image): (&Attended, Option<&Attended>),
        bias: Option<&Tensor<4>>,
        receive: Receive<'_>,
    ) -> (KvGradient, Option<KvGradient>) {
        let rows = self.trace.text.rows.clone();
        let input = self.trace.inputs.pop().expect("one input per block");
        // a block below is reached only through this one's input
        let x = leaf(input, !self.trace.inputs.is_empty() || self.tracked[0]);
        let modulation = leaf(self.trace.modulation.clone(), self.tracked[2]);
        let (text, image) = (text.chosen(&rows), image.map(|image| image.chosen(&rows)));
        let kv = TextKv { text: text.leaves.clone(), image: image.as_ref().map(|image| image.leaves.clone()) };
        let out = block.forward(x.clone(), &modulation, &self.rope, &kv, bias);
        let Some(product) = weighted(&out, self.hidden.take()) else {
            return (text.gradient(None), image.map(|image| image.gradient(None)));
        };
        let gradients = product.backward();
        receive(&gradients);
        self.hidden = x.grad(&gradients);
        add(&mut self.modulation, modulation.grad(&gradients));
        (text.gradient(Some(&gradients)), image.map(|image| image.gradient(Some(&gradients))))
    }

    /// Goes through the embeddings of patches and time.
    ///
    /// temb is used by the head's shift, by its scale and by the projection to the modulation. The engine goes through a graph from
    /// its end, last operand first: hence the order of the terms.
    fn backward_start(self, model: &WanTransformer, receive: Receive<'_>) {
        let grid = PatchGrid::new(&model.config, self.trace.latents.dims());
        let start = model.embed(self.trace.latents.autodiff(), self.trace.sinusoids, &grid);
        let [shift, scale] = self.temb;
        let terms = [
            weighted(&start.hidden, self.hidden),
            weighted(&start.modulation, self.modulation),
            weighted(&start.temb, scale),
            weighted(&start.temb, shift),
        ];
        if let Some(sum) = terms.into_iter().flatten().reduce(|sum, term| sum + term) {
            receive(&sum.backward());
        }
    }
}

/// Keys and values of the text, or of the image, in one block, computed again with a graph.
struct Attended {
    /// What keys and values are made of: apart, so that their gradients are added one by one.
    inputs: [Tensor<3>; 2],
    kv: KeyValues,
    /// Whether keys and values lead to trained weights.
    tracked: [bool; 2],
}

/// Those of a branch's samples.
struct Chosen {
    /// Within the graph of [`Attended`].
    kv: KeyValues,
    /// Their values as the start of the block's graph.
    leaves: KeyValues,
}

/// What came back from one branch.
struct KvGradient {
    /// See [`Chosen::kv`].
    chosen: KeyValues,
    keys: Option<Tensor<3>>,
    values: Option<Tensor<3>>,
}

impl Chosen {
    fn gradient(self, gradients: Option<&Gradients>) -> KvGradient {
        let of = |x: &Tensor<3>| gradients.and_then(|gradients| x.grad(gradients));
        KvGradient { keys: of(&self.leaves.keys), values: of(&self.leaves.values), chosen: self.kv }
    }
}

impl Attended {
    fn new(embedded: &Tensor<3>, project: impl Fn([Tensor<3>; 2]) -> KeyValues) -> Self {
        let inputs = [0, 1].map(|_| leaf(embedded.clone().inner(), embedded.is_tracked()));
        let kv = project(inputs.clone());
        Self { inputs, tracked: [kv.keys.is_tracked(), kv.values.is_tracked()], kv }
    }

    fn chosen(&self, rows: &[usize]) -> Chosen {
        let kv = self.kv.select(rows);
        let leaves = KeyValues { keys: leaf(kv.keys.clone(), self.tracked[0]), values: leaf(kv.values.clone(), self.tracked[1]) };
        Chosen { kv, leaves }
    }

    /// Adds the gradient of what was embedded to `sum`, that of the values first.
    fn backward(self, branches: Vec<KvGradient>, sum: &mut Option<Tensor<3>>, receive: Receive<'_>) {
        let [mut of_keys, mut of_values] = [None, None];
        for KvGradient { chosen, keys, values } in branches {
            add(&mut of_keys, weighted(&chosen.keys, keys));
            add(&mut of_values, weighted(&chosen.values, values));
        }
        for (product, input) in [(of_values, &self.inputs[1]), (of_keys, &self.inputs[0])] {
            if let Some(product) = product {
                let gradients = product.backward();
                receive(&gradients);
                add(sum, input.grad(&gradients));
            }
        }
    }
}

/// The values of `x` as the start of a new graph.
fn leaf<const R: usize>(x: Tensor<R>, tracked: bool) -> Tensor<R> {
    let x = x.inner().autodiff();
    if tracked { x.require_grad() } else { x }
}

/// `sum x g`, whose gradient with respect to x is g; none if nothing would come of it.
fn weighted<const R: usize>(x: &Tensor<R>, gradient: Option<Tensor<R>>) -> Option<Tensor<1>> {
    gradient.filter(|_| x.is_tracked()).map(|gradient| (x.clone() * gradient).sum())
}

fn add<const R: usize>(sum: &mut Option<Tensor<R>>, term: Option<Tensor<R>>) {
    if let Some(term) = term {
        *sum = Some(match sum.take() {
            None => term,
            Some(sum) => term + sum,
        });
    }
}
