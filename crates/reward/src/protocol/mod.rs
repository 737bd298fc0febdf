//! The project's own protocol, in JSON: what [`crate::http`] posts and [`crate::command`] writes as a line.
//!
//! The schema is docs/reward_protocol.schema.json. A request has samples, an answer has one score for each, matched by id:
//!
//! ```text
//! {"protocol": 1, "samples": [{"id", "prompt", "fps", "metadata"?, "frames": {"encoding", "height", "width", "indices", "data" | "path"}}]}
//! {"scores": [{"id", "value" | "frame_values" | "error", "components"?}]}
//! ```

mod answer;
mod request;

pub use answer::{Info, Matched, parse_answer};
pub use request::{Request, sample_id};

pub(crate) use answer::{beginning, gist};

use std::path::PathBuf;

use crate::{Aggregation, Batching, Encoding, FrameSelection, RewardError, Sample, Scored, parallel};

/// The number of this protocol.
pub const PROTOCOL: u32 = 1;

/// How samples become requests.
#[derive(Clone, Debug)]
pub(crate) struct Wire {
    pub frames: FrameSelection,
    pub aggregate: Aggregation,
    pub encoding: Encoding,
    /// Frames go through files here rather than through the message.
    pub shared_folder: Option<PathBuf>,
}

impl Wire {
    /// Scores a batch, handed over as `batching` says. `exchange` gets the text of a request, its key, and what reads
    /// the answer.
    pub fn score(
        &self,
        name: &str,
        batch: &[Sample<'_>],
        batching: Batching,
        exchange: impl Fn(Vec<u8>, &str, &dyn Fn(&[u8]) -> Matched) -> Matched + Sync,
    ) -> Vec<Scored> {
        let size = batching.batch_size.max(1);
        let chunks: Vec<(usize, &[Sample<'_>])> = batch.chunks(size).enumerate().map(|(i, chunk)| (i * size, chunk)).collect();
        let scores = parallel::map(&chunks, batching.concurrency, |&(offset, chunk)| {
            let scores = self.exchange_one(chunk, offset, &exchange);
            let scores = scores.unwrap_or_else(|reason| chunk.iter().map(|_| Err(reason.clone())).collect());
            let named = |(sample, score): (&Sample<'_>, Result<_, String>)| score.map_err(|e| RewardError::new(name, sample.prompt, e));
            chunk.iter().zip(scores).map(named).collect::<Vec<Scored>>()
        });
        scores.into_iter().flatten().collect()
    }

    fn exchange_one(
        &self,
        chunk: &[Sample<'_>],
        offset: usize,
        exchange: &impl Fn(Vec<u8>, &str, &dyn Fn(&[u8]) -> Matched) -> Matched,
    ) -> Matched {
        // The files of shared frames live as long as the request.
        let request = Request::new(self, chunk, offset)?;
        exchange(request.to_bytes()?, request.key(), &|answer| parse_answer(answer, &request.expected(), self.aggregate))
    }
}
