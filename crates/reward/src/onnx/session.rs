//! A network in ONNX, run by ONNX Runtime, whose library is opened when the first network is.

use std::path::{Path, PathBuf};

use crate::SetupError;

/// Floats with their shape.
#[derive(Clone, Debug, PartialEq)]
pub struct Array {
    /// Row by row.
    pub values: Vec<f32>,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
}

/// Where the runtime's library is: what the recipe says, else `ORT_DYLIB_PATH`, else wherever the system looks for the usual name.
pub(crate) fn library_path(setting: Option<&Path>) -> PathBuf {
    let named = setting.map(Path::to_path_buf).or_else(|| std::env::var_os("ORT_DYLIB_PATH").filter(|v| !v.is_empty()).map(PathBuf::from));
    named.unwrap_or_else(|| format!("{}onnxruntime{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX).into())
}

#[cfg(feature = "onnx")]
pub(crate) use runtime::Session;

#[cfg(not(feature = "onnx"))]
pub(crate) use without::Session;

#[cfg(feature = "onnx")]
mod runtime {
    use super::{Array, Path, SetupError, library_path};
    use crate::error::require;
    use std::sync::{Mutex, OnceLock, PoisonError};

    /// A loaded network. It takes one array of floats.
    pub(crate) struct Session {
        /// The wrapper wants exclusive use; one call computes at a time.
        inner: Mutex<ort::session::Session>,
    }

    impl Session {
        /// Opens `model`, the file that the setting `field` names.
        ///
        /// # Errors
        /// A runtime or a file that cannot be opened.
        pub(crate) fn open(model: &Path, field: &'static str, library: Option<&Path>, threads: usize) -> Result<Self, SetupError> {
            let hint = match field {
                "model" => "the path is relative to the current folder",
                _ => "`scripts/fetch_ocr.sh` puts PP-OCR's networks into models/ocr/; the path is relative to the current folder",
            };
            require(model.is_file(), field, model.display(), "a file in ONNX format", hint)?;
            let environment = environment(library)?;
            let unusable = |error: String| SetupError::field(field, model.display(), "a network that ONNX Runtime can run", error);
            let build = || {
                ort::session::Session::builder(environment)
                    .and_then(|builder| builder.with_intra_threads(threads).map_err(Into::into))
                    .and_then(|mut builder| builder.commit_from_file(model))
            };
            let session = build().map_err(|error| unusable(error.to_string()))?;
            Ok(Self { inner: Mutex::new(session) })
        }

        /// Text that the network's author stored under `key`.
        pub(crate) fn metadata(&self, key: &str) -> Option<String> {
            self.lock().metadata().ok()?.custom(key)
        }

        /// How many rows the first input must have, where the network says so.
        pub(crate) fn fixed_rows(&self) -> Option<usize> {
            let rows = *self.lock().inputs().first()?.dtype().tensor_shape()?.first()?;
            usize::try_from(rows).ok().filter(|&rows| rows > 0)
        }

        /// The first output.
        ///
        /// # Errors
        /// What the runtime says: an input that does not fit, an output that is not made of floats.
        pub(crate) fn run(&self, input: Array) -> Result<Array, String> {
            let shape: Vec<i64> = input.shape.iter().map(|&size| size as i64).collect();
            let tensor = ort::value::Tensor::from_array((shape, input.values)).map_err(|e| e.to_string())?;
            let mut session = self.lock();
            let outputs = session.run(ort::inputs![tensor]).map_err(|e| e.to_string())?;
            let first = outputs.values().next().ok_or("the network has no output")?;
            let (shape, values) = first.try_extract_tensor::<f32>().map_err(|e| e.to_string())?;
            Ok(Array { values: values.to_vec(), shape: shape.iter().map(|&size| size.max(0) as usize).collect() })
        }

        fn lock(&self) -> std::sync::MutexGuard<'_, ort::session::Session> {
            self.inner.lock().unwrap_or_else(PoisonError::into_inner)
        }
    }

    /// The one environment of the process. The first library that opens stays: a process cannot hold two.
    fn environment(library: Option<&Path>) -> Result<&'static ort::environment::Environment, SetupError> {
        static ENVIRONMENT: OnceLock<ort::environment::Environment> = OnceLock::new();
        if let Some(environment) = ENVIRONMENT.get() {
            return Ok(environment);
        }
        let path = library_path(library);
        let hint = "`pip download --no-deps onnxruntime` brings it: unpack the wheel and name onnxruntime/capi/libonnxruntime.so.* as `library`, or in ORT_DYLIB_PATH";
        let failed = |error: String| SetupError::new("", format!("ONNX Runtime cannot be opened: {error}"), hint);
        let builder = ort::init_from(&path).map_err(|error| failed(error.to_string()))?;
        let environment = builder.with_telemetry(false).build().map_err(|error| failed(error.to_string()))?;
        Ok(ENVIRONMENT.get_or_init(|| environment))
    }
}

#[cfg(not(feature = "onnx"))]
mod without {
    use super::{Array, Path, SetupError};

    /// Stands where this program was built without ONNX Runtime.
    pub(crate) enum Session {}

    impl Session {
        pub(crate) fn open(_: &Path, _: &'static str, _: Option<&Path>, _: usize) -> Result<Self, SetupError> {
            let hint = "build with the default features, or with `--features onnx`";
            Err(SetupError::new("", "this program was built without ONNX Runtime", hint))
        }

        pub(crate) fn metadata(&self, _: &str) -> Option<String> {
            match *self {}
        }

        pub(crate) fn fixed_rows(&self) -> Option<usize> {
            match *self {}
        }

        pub(crate) fn run(&self, _: Array) -> Result<Array, String> {
            match *self {}
        }
    }
}
