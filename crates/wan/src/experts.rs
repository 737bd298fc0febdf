//! One velocity network, or two that share the schedule: of Wan2.2 A14B, one takes the noisy steps and the other the rest.
//!
//! ```text
//! v(x, t) = v_1(x, t)  if t >= 1000 boundary_ratio,  else v_2(x, t)
//! ```
//!
//! In a model folder these are `transformer/` and `transformer_2/`, with `boundary_ratio` in model_index.json (diffusers, `WanPipeline`).
//! Each has its own scale of guidance, and its own adapter. **Which step uses which network is a function of the schedule alone.**

use crate::config::read_json;
use crate::error::{Error, Result};
use crate::layers::LinearSite;
use crate::lora::{self, AdapterFile, Lora};
use crate::transformer::{TransformerConfig, WanTransformer};
use burn::tensor::{DType, Device};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Folder of the second network in a model, and of its adapter in an adapter folder.
pub const SECOND: &str = "transformer_2";

/// Where the second network takes over.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Boundary(f64);

impl Boundary {
    /// Wan2.2 T2V-A14B.
    pub const T2V_A14B: Self = Self(0.875);
    /// Wan2.2 I2V-A14B.
    pub const I2V_A14B: Self = Self(0.9);

    /// From `boundary_ratio`; none unless it is above 0 and below 1, so that both networks have timesteps.
    pub fn new(ratio: f64) -> Option<Self> {
        (ratio > 0.0 && ratio < 1.0).then_some(Self(ratio))
    }

    /// `boundary_ratio`
    pub fn ratio(self) -> f64 {
        self.0
    }

    /// The network, 0 or 1, of a timestep on the 0..1000 scale.
    pub fn network(self, timestep: f64) -> usize {
        usize::from(timestep < 1000.0 * self.0)
    }

    /// The boundary of a released model, recognised by the name of its folder (`Wan2.2-T2V-A14B-Diffusers`); none if it has one network.
    pub fn released(folder: &str) -> Option<Self> {
        match folder.to_ascii_lowercase() {
            name if name.contains("wan2.2-t2v-a14b") => Some(Self::T2V_A14B),
            name if name.contains("wan2.2-i2v-a14b") => Some(Self::I2V_A14B),
            _ => None,
        }
    }

    /// Of the model in a folder; none if it has one network, or no model_index.json.
    ///
    /// # Errors
    /// A model_index.json that cannot be read, or names a second network without a boundary, or the other way round.
    pub fn of_folder(dir: &Path) -> Result<Option<Self>> {
        let path = dir.join("model_index.json");
        if !path.exists() {
            return Ok(None);
        }
        let index: Index = read_json(&path)?;
        index.boundary().map_err(|(reason, hint)| Error::invalid(&path, reason, hint))
    }
}

/// What model_index.json says about the second network.
#[derive(Debug, Deserialize)]
struct Index {
    #[serde(default)]
    transformer_2: Value,
    #[serde(default)]
    boundary_ratio: Value,
}

impl Index {
    fn boundary(&self) -> std::result::Result<Option<Boundary>, (String, &'static str)> {
        const BOTH: &str =
            "a model with two transformers has both `transformer_2` and `boundary_ratio`, as Wan2.2 T2V-A14B; one with one has neither";
        let (ratio, names_second) = (&self.boundary_ratio, names_a_class(&self.transformer_2));
        match (names_second, ratio.as_f64().and_then(Boundary::new)) {
            (true, Some(boundary)) => Ok(Some(boundary)),
            (false, None) if ratio.is_null() => Ok(None),
            (true, None) if ratio.is_null() => Err(("`transformer_2` is set, but not `boundary_ratio`".into(), BOTH)),
            (false, Some(_)) => Err((format!("`boundary_ratio` is `{ratio}`, but `transformer_2` is not set"), BOTH)),
            (_, None) => Err((format!("`boundary_ratio` is `{ratio}`, expected a number between 0 and 1"), BOTH)),
        }
    }
}

/// An absent part is null or `[null, null]`.
fn names_a_class(entry: &Value) -> bool {
    match entry {
        Value::Null => false,
        Value::Array(parts) => parts.iter().any(|part| !part.is_null()),
        _ => true,
    }
}

/// The network for the timesteps below a boundary.
#[derive(Debug)]
pub struct SecondExpert {
    /// The network.
    pub transformer: WanTransformer,
    /// Where it takes over.
    pub boundary: Boundary,
}

impl SecondExpert {
    /// Reads `DIR/transformer_2`, if the model in `DIR` has it.
    ///
    /// # Errors
    /// As [`Boundary::of_folder`] and [`WanTransformer::load`].
    pub fn load(dir: &Path, device: &Device, dtype: DType) -> Result<Option<Self>> {
        let Some(boundary) = Boundary::of_folder(dir)? else { return Ok(None) };
        Ok(Some(Self { transformer: WanTransformer::load(&dir.join(SECOND), device, dtype)?, boundary }))
    }
}

/// The networks of a model.
#[derive(Debug, Clone, Copy)]
pub struct Experts<'a> {
    /// The only one, or that of the noisy steps.
    pub first: &'a WanTransformer,
    /// That of the other steps.
    pub second: Option<&'a SecondExpert>,
}

impl<'a> From<&'a WanTransformer> for Experts<'a> {
    fn from(first: &'a WanTransformer) -> Self {
        Self { first, second: None }
    }
}

impl<'a> Experts<'a> {
    /// In order.
    pub fn networks(self) -> impl Iterator<Item = &'a WanTransformer> {
        std::iter::once(self.first).chain(self.second.map(|second| &second.transformer))
    }

    /// Where the second takes over, if there is one.
    pub fn boundary(self) -> Option<Boundary> {
        self.second.map(|second| second.boundary)
    }

    /// Reads adapters as [`read_adapters`] does, for these networks.
    ///
    /// # Errors
    /// As there.
    pub fn read_adapters(self, path: &Path, second: Option<&Path>) -> Result<Vec<AdapterFile>> {
        read_adapters(&self.networks().map(|network| network.linears.as_slice()).collect::<Vec<_>>(), path, second)
    }

    /// Puts adapters on the networks, in order.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn attach(self, adapters: Vec<AdapterFile>, device: &Device) -> Result<Vec<Lora>> {
        adapters.into_iter().zip(self.networks()).map(|(file, network)| file.attach(&network.linears, device)).collect()
    }

    /// Takes every adapter off the networks.
    pub fn detach(self) {
        self.networks().for_each(|network| Lora::detach(&network.linears));
    }
}

/// The linear layers of the networks in a model folder, in order, from their configs.
///
/// # Errors
/// As [`Boundary::of_folder`] and [`TransformerConfig::load`].
pub fn linear_sites(dir: &Path) -> Result<Vec<Vec<LinearSite>>> {
    let folders = [Some("transformer"), Boundary::of_folder(dir)?.map(|_| SECOND)];
    let sites = |folder| WanTransformer::sites(TransformerConfig::load(&dir.join(folder).join("config.json"))?);
    folders.into_iter().flatten().map(sites).collect()
}

/// Reads the adapters of networks with the given linear layers: `path` is that of the first; `second`, or `PATH/transformer_2` where that is
/// a folder, that of the second.
///
/// # Errors
/// A file that is no adapter of the network; one for a second network that is not there.
pub fn read_adapters<S: AsRef<[LinearSite]>>(networks: &[S], path: &Path, second: Option<&Path>) -> Result<Vec<AdapterFile>> {
    let own: Option<PathBuf> = Some(path.join(SECOND)).filter(|own| own.is_dir());
    let paths = [Some(path.to_path_buf()), second.map(Path::to_path_buf).or(own)];
    if let (1, [_, Some(path)]) = (networks.len(), &paths) {
        let hint = "give an adapter that was made for this model";
        return Err(Error::invalid(path, "the adapter is for a second transformer, and the model has one", hint));
    }
    paths.into_iter().flatten().zip(networks).map(|(path, sites)| lora::load(&path, sites.as_ref())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_boundary_belongs_to_the_first_network() {
        let boundary = Boundary::T2V_A14B;
        assert_eq!([999.0, 876.0, 875.0, 874.0, 0.0].map(|timestep| boundary.network(timestep)), [0, 0, 0, 1, 1]);
        assert_eq!([0.0, 1.0, -0.5, f64::NAN].map(Boundary::new), [None; 4]);
    }

    #[test]
    fn half_a_pair_is_refused() {
        let boundary = |second: Value, ratio: Value| Index { transformer_2: second, boundary_ratio: ratio }.boundary();
        let class = || json!(["diffusers", "WanTransformer3DModel"]);
        assert_eq!(boundary(class(), json!(0.875)), Ok(Some(Boundary::T2V_A14B)));
        assert_eq!(boundary(json!([null, null]), json!(null)), Ok(None));
        assert_eq!(boundary(json!(null), json!(null)), Ok(None));
        for (second, ratio, message) in [
            (class(), json!(null), "`transformer_2` is set, but not `boundary_ratio`"),
            (json!(null), json!(0.875), "`boundary_ratio` is `0.875`, but `transformer_2` is not set"),
            (class(), json!(1.5), "`boundary_ratio` is `1.5`, expected a number between 0 and 1"),
            (json!(null), json!("x"), "`boundary_ratio` is `\"x\"`, expected a number between 0 and 1"),
        ] {
            assert_eq!(boundary(second, ratio).expect_err("refused").0, message);
        }
    }
}
