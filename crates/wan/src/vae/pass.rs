//! One pass of a clip through the encoder or the decoder, in one or more chunks of time.
//!
//! A causal network gives the same result for any division of a clip into chunks if each layer remembers the last frames of
//! its input. The division is a matter of memory and speed only, apart from the very first frame, which the layers
//! that change the frame rate treat by itself.

use burn::tensor::Tensor;

/// Called with the name and the output of every part of the network, for tests and debugging.
pub type Observer<'a> = &'a mut dyn FnMut(&str, &Tensor<5>);

/// What the layers of a network remember from chunk to chunk, each in its own slot. The layers are visited in the same
/// order for every chunk, so that the n-th request of a chunk belongs to the n-th slot.
#[derive(Default)]
pub struct Pass<'a> {
    slots: Vec<Option<Tensor<5>>>,
    next: usize,
    chunk: usize,
    is_last: bool,
    observer: Option<Observer<'a>>,
}

impl<'a> Pass<'a> {
    /// A pass over a new clip.
    pub fn new(observer: Option<Observer<'a>>) -> Self {
        Self { observer, ..Self::default() }
    }

    /// Starts the next chunk. Nothing is remembered from the last one.
    pub fn start_chunk(&mut self, chunk: usize, is_last: bool) {
        self.next = 0;
        self.chunk = chunk;
        self.is_last = is_last;
    }

    /// Whether this chunk begins with the first frame of the clip.
    pub fn is_first_chunk(&self) -> bool {
        self.chunk == 0
    }

    /// Puts up to `count` frames of the layer's previous input before `x` [B, C, F, H, W], and remembers the last `count`
    /// frames. Returns the longer tensor and the number of frames put before.
    pub fn extend(&mut self, x: Tensor<5>, count: usize) -> (Tensor<5>, usize) {
        let slot = self.slot();
        let (x, known) = match self.slots[slot].take() {
            Some(previous) => {
                let known = previous.dims()[2];
                (Tensor::cat(vec![previous, x], 2), known)
            }
            None => (x, 0),
        };
        if !self.is_last {
            let frames = x.dims()[2];
            let kept = frames.min(count);
            // a part is a view of the whole, which would stay in memory until the next chunk: a product has memory of its own
            self.slots[slot] = Some(x.clone().narrow(2, frames - kept, kept).mul_scalar(1.0));
        }
        (x, known)
    }

    /// Passes over a layer's slot in a chunk that does not reach the layer.
    pub fn skip(&mut self) {
        self.slot();
    }

    /// Shows `x` to the observer.
    pub fn observe(&mut self, name: std::fmt::Arguments<'_>, x: &Tensor<5>) {
        if let Some(observer) = self.observer.as_mut() {
            observer(&name.to_string(), x);
        }
    }

    fn slot(&mut self) -> usize {
        let slot = self.next;
        self.next += 1;
        if self.slots.len() <= slot {
            self.slots.push(None);
        }
        slot
    }
}
