//! The devices that tensors live on, chosen by name when a program starts.
//!
//! ```text
//! cpu   cuda[:i]   metal[:i]   rocm[:i]   vulkan[:i]   wgpu[:i]   auto
//! ```
//!
//! The CPU is always there. Each of the others is a cargo feature of its name, and its driver is looked for when it is asked for: what is not
//! compiled in, or has no driver, is an error and never a panic.

mod trial;

pub use trial::{HALF_TOLERANCE, Half, Trial, tolerance, try_device};

use crate::error::{Error, Result};
use burn::backend::DispatchDevice;
use burn::tensor::{DType, Device, Tensor};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};

/// What computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Backend {
    /// The processor, in f32, with the operations of [`ops`](crate::ops).
    Cpu,
    /// NVIDIA GPUs.
    Cuda,
    /// Apple GPUs.
    Metal,
    /// AMD GPUs.
    Rocm,
    /// Any GPU with a Vulkan driver, by SPIR-V.
    Vulkan,
    /// Any GPU, by WGSL and whichever graphics API the machine has.
    Wgpu,
}

impl Backend {
    /// All of them.
    pub const ALL: [Self; 6] = [Self::Cpu, Self::Cuda, Self::Metal, Self::Rocm, Self::Vulkan, Self::Wgpu];

    /// Those of GPUs, in the order in which `auto` tries them.
    pub const GPUS: [Self; 5] = [Self::Cuda, Self::Metal, Self::Rocm, Self::Vulkan, Self::Wgpu];

    /// As it is written: the name of its cargo feature too.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
            Self::Metal => "metal",
            Self::Rocm => "rocm",
            Self::Vulkan => "vulkan",
            Self::Wgpu => "wgpu",
        }
    }

    /// Whether this program was built with it.
    pub fn is_compiled_in(self) -> bool {
        match self {
            Self::Cpu => true,
            Self::Cuda => cfg!(feature = "cuda"),
            Self::Metal => cfg!(feature = "metal"),
            Self::Rocm => cfg!(feature = "rocm"),
            Self::Vulkan => cfg!(feature = "vulkan"),
            Self::Wgpu => cfg!(feature = "wgpu"),
        }
    }

    /// The devices of this machine, none of them opened. Software drivers, which compute on the processor, come last.
    ///
    /// # Errors
    /// A backend that was not compiled in, or a driver that cannot even be asked.
    pub fn devices(self) -> Result<Vec<FoundDevice>> {
        if !self.is_compiled_in() {
            return Err(self.error(0, "this program was built without it", &format!("build it with {}", self.build_command())));
        }
        let listed = guarded(|| enumerate(self)).map_err(|reason| self.error(0, &reason, self.driver_hint()))?;
        let with_kind = |device: Device| (is_software(&device), device);
        let mut found: Vec<(bool, Device)> = listed.into_iter().map(with_kind).collect();
        found.sort_by_key(|(is_software, _)| *is_software);
        let numbered = found.into_iter().enumerate();
        Ok(numbered.map(|(index, (is_software, device))| FoundDevice { backend: self, index, is_software, device }).collect())
    }

    /// How to get a program that has it.
    pub fn build_command(self) -> String {
        format!("`cargo build --release -p flash-grpo --features {}`", self.name())
    }

    fn driver_hint(self) -> &'static str {
        match self {
            Self::Cpu => "this should not happen",
            Self::Cuda => "is the NVIDIA driver (`libcuda`) installed, and does `nvidia-smi` list the GPU?",
            Self::Metal => "Metal is there on Apple machines only",
            Self::Rocm => "is ROCm installed, and does `rocminfo` list the GPU?",
            Self::Vulkan | Self::Wgpu => {
                "is a Vulkan driver installed (Debian and Ubuntu: `mesa-vulkan-drivers` and `libvulkan1`, or that of the GPU's maker)?"
            }
        }
    }

    fn error(self, index: usize, reason: &str, hint: &str) -> Error {
        Error::Argument {
            field: "device",
            value: DeviceChoice::Of(self, index).to_string(),
            reason: reason.to_owned(),
            hint: hint.to_owned(),
        }
    }
}

/// A device that a driver lists.
#[derive(Debug, Clone)]
pub struct FoundDevice {
    /// What computes.
    pub backend: Backend,
    /// Number among the devices of the backend.
    pub index: usize,
    /// Whether it is a driver that computes on the processor: for tests, never fast.
    pub is_software: bool,
    device: Device,
}

impl FoundDevice {
    /// How it is asked for.
    pub fn choice(&self) -> DeviceChoice {
        DeviceChoice::Of(self.backend, self.index)
    }

    /// Opens the device and lets it add two numbers.
    ///
    /// # Errors
    /// The driver's reason, as far as it gives one.
    pub fn open(&self) -> Result<OpenDevice> {
        let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = opened.iter().find(|known| known.choice == self.choice()) {
            return Ok(known.clone());
        }
        let open = || initialise(&self.device).map(|()| (adds(&self.device), identity(&self.device)));
        let (adds, (name, memory)) = guarded(open)
            .flatten()
            .map_err(|reason| self.backend.error(self.index, &format!("it does not open: {reason}"), self.backend.driver_hint()))?;
        if !adds {
            let reason = "it opens, but does not compute that 1 + 2 is 3";
            return Err(self.backend.error(self.index, reason, "`flash-grpo doctor` tries all devices; is the driver up to date?"));
        }
        let open = OpenDevice { device: self.device.clone(), choice: self.choice(), name, memory };
        opened.push(open.clone());
        Ok(open)
    }
}

/// A graphics device can be set up once in a process.
static OPENED: Mutex<Vec<OpenDevice>> = Mutex::new(Vec::new());

/// A device that computes.
#[derive(Debug, Clone)]
pub struct OpenDevice {
    /// Where to put tensors.
    pub device: Device,
    /// What was opened; never [`DeviceChoice::Auto`].
    pub choice: DeviceChoice,
    /// What the driver calls it.
    pub name: String,
    /// Bytes of memory, where the driver tells.
    pub memory: Option<u64>,
}

/// Which device a user wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DeviceChoice {
    /// The first GPU that opens, else the CPU.
    Auto,
    /// A device by its number among those of its backend.
    Of(Backend, usize),
}

impl Default for DeviceChoice {
    fn default() -> Self {
        Self::Of(Backend::Cpu, 0)
    }
}

impl DeviceChoice {
    /// Opens it. Opening a device a second time gives the first one again.
    ///
    /// # Errors
    /// A device that is not compiled in, has no driver, does not exist, or does not compute.
    pub fn open(self) -> Result<OpenDevice> {
        let Self::Of(backend, index) = self else { return Ok(first_gpu().unwrap_or_else(cpu)) };
        if backend == Backend::Cpu {
            return Ok(cpu());
        }
        let devices = backend.devices()?;
        match devices.get(index) {
            Some(device) => device.open(),
            None if devices.is_empty() => {
                Err(backend.error(index, "no such device: the machine has no driver or no device for it", backend.driver_hint()))
            }
            None => {
                let known: Vec<String> = devices.iter().map(|device| format!("`{}`", device.choice())).collect();
                Err(backend.error(index, "no device of that number", &format!("there is {}", known.join(", "))))
            }
        }
    }
}

/// Whether tensors of this device are computed by the CPU engine.
pub fn is_cpu(device: &Device) -> bool {
    matches!(device.clone().inner().as_dispatch(), DispatchDevice::Flex(_))
}

/// Whether a device computes in `dtype`.
///
/// # Errors
/// It does not.
pub fn check_dtype(device: &Device, dtype: DType) -> Result<()> {
    if device.clone().inner().supports_dtype(dtype) {
        return Ok(());
    }
    let (value, name) = (dtype.name().to_owned(), name_of(device));
    let hint = "`mixed_precision = \"no\"` computes in f32 everywhere".into();
    Err(Error::Argument { field: "mixed_precision", value, reason: format!("the device `{name}` cannot compute in it"), hint })
}

/// What the device was opened as: `cpu`, `cuda:1`; for one that was not opened here, what the engine calls it.
pub fn name_of(device: &Device) -> String {
    if is_cpu(device) {
        return DeviceChoice::default().to_string();
    }
    let opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    let known = opened.iter().find(|known| known.device == *device);
    known.map_or_else(|| format!("{device:?}"), |known| known.choice.to_string())
}

/// The processor.
pub fn cpu() -> OpenDevice {
    OpenDevice { device: Device::flex(), choice: DeviceChoice::default(), name: "CPU".to_owned(), memory: None }
}

fn first_gpu() -> Option<OpenDevice> {
    let compiled_in = Backend::GPUS.into_iter().filter(|backend| backend.is_compiled_in());
    compiled_in
        .filter_map(|backend| backend.devices().ok())
        .flatten()
        .filter(|device| !device.is_software)
        .find_map(|device| device.open().ok())
}

/// `work`, with a panic as its message: the engine reports some absent drivers and libraries in no other way.
fn guarded<R>(work: impl FnOnce() -> R) -> Result<R, String> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
        text.unwrap_or("the driver gives no reason").lines().next().unwrap_or_default().to_owned()
    })
}

fn adds(device: &Device) -> bool {
    let sum = Tensor::<1>::from_floats([1.0], device) + Tensor::<1>::from_floats([2.0], device);
    sum.into_data().iter::<f32>().eq([3.0])
}

#[cfg(not(feature = "gpu"))]
mod engine {
    use super::{Backend, Device};

    pub(super) fn enumerate(_: Backend) -> Vec<Device> {
        vec![Device::flex()]
    }

    pub(super) fn is_software(_: &Device) -> bool {
        false
    }

    pub(super) fn initialise(_: &Device) -> Result<(), String> {
        Ok(())
    }

    pub(super) fn identity(_: &Device) -> (String, Option<u64>) {
        ("CPU".to_owned(), None)
    }
}

#[cfg(feature = "gpu")]
mod engine {
    use super::{Backend, Device};
    use burn::backend::DispatchDevice;
    #[cfg(feature = "wgpu")]
    use burn::backend::{CubeDevice, WgpuDeviceKind};
    #[cfg(feature = "wgpu")]
    use burn::tensor::DeviceKind;
    use burn::tensor::DeviceType;

    pub(super) fn enumerate(backend: Backend) -> Vec<Device> {
        let kind = match backend {
            #[cfg(feature = "cuda")]
            Backend::Cuda => DeviceType::Cuda,
            #[cfg(feature = "metal")]
            Backend::Metal => DeviceType::Metal,
            #[cfg(feature = "rocm")]
            Backend::Rocm => DeviceType::Rocm,
            #[cfg(feature = "vulkan")]
            Backend::Vulkan => DeviceType::Vulkan,
            #[cfg(feature = "wgpu")]
            Backend::Wgpu => DeviceType::Wgpu,
            _ => DeviceType::Flex,
        };
        Device::enumerate(kind).into_vec()
    }

    #[cfg(feature = "wgpu")]
    pub(super) fn is_software(device: &Device) -> bool {
        matches!(device.as_dispatch(), DispatchDevice::Cube(CubeDevice::Wgpu(wgpu)) if wgpu.kind == WgpuDeviceKind::Cpu)
    }

    #[cfg(not(feature = "wgpu"))]
    pub(super) fn is_software(_: &Device) -> bool {
        false
    }

    /// Sets up a graphics device, which says why where it cannot; all others are set up at first use.
    #[cfg(feature = "wgpu")]
    pub(super) fn initialise(device: &Device) -> Result<(), String> {
        let DispatchDevice::Cube(CubeDevice::Wgpu(wgpu)) = device.as_dispatch() else { return Ok(()) };
        let kind = match wgpu.kind {
            WgpuDeviceKind::DiscreteGpu(index) => DeviceKind::DiscreteGpu(index),
            WgpuDeviceKind::IntegratedGpu(index) => DeviceKind::IntegratedGpu(index),
            WgpuDeviceKind::VirtualGpu(index) => DeviceKind::VirtualGpu(index),
            WgpuDeviceKind::Cpu => DeviceKind::Cpu,
            _ => return Ok(()),
        };
        let options = Device::wgpu_options().device_kind(kind).graphics_api(wgpu.backend);
        options.init().map(drop).map_err(|error| error.to_string())
    }

    #[cfg(not(feature = "wgpu"))]
    pub(super) fn initialise(_: &Device) -> Result<(), String> {
        Ok(())
    }

    /// Name and bytes of memory of an open device.
    pub(super) fn identity(device: &Device) -> (String, Option<u64>) {
        match device.as_dispatch() {
            DispatchDevice::Cube(cube) => {
                let client = cube.client();
                let properties = client.properties();
                (properties.identity.name.clone(), properties.memory.max_memory())
            }
            _ => ("CPU".to_owned(), None),
        }
    }
}

use engine::{enumerate, identity, initialise, is_software};

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Of(backend, 0) => write!(f, "{backend}"),
            Self::Of(backend, index) => write!(f, "{backend}:{index}"),
        }
    }
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        let (name, number) = text.split_once(':').map_or((text, None), |(name, number)| (name, Some(number)));
        let backend = Backend::ALL.into_iter().find(|backend| backend.name() == name);
        let backend = backend.ok_or_else(|| format!("unknown device `{text}`, expected {EXPECTED}"))?;
        match number {
            None => Ok(Self::Of(backend, 0)),
            Some(_) if backend == Backend::Cpu => Err(format!("`{text}`: there is one CPU, written `cpu`")),
            Some(number) => {
                let index =
                    number.parse().map_err(|_| format!("`{text}`: `{number}` is not the number of a device, expected {EXPECTED}"))?;
                Ok(Self::Of(backend, index))
            }
        }
    }
}

const EXPECTED: &str =
    "`cpu`, `auto`, or one of `cuda`, `metal`, `rocm`, `vulkan`, `wgpu`, with `:1` and so on for other devices than the first";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_as_they_are_written() {
        for text in ["auto", "cpu", "cuda", "cuda:3", "metal", "rocm:1", "vulkan", "wgpu:12"] {
            assert_eq!(text.parse::<DeviceChoice>().map(|choice| choice.to_string()).as_deref(), Ok(text));
        }
        assert_eq!("cuda:0".parse::<DeviceChoice>(), Ok(DeviceChoice::Of(Backend::Cuda, 0)));
        for text in ["", "gpu", "CPU", "cpu:0", "cuda:", "cuda:-1", "cuda:x", "cuda:0:1", "auto:1"] {
            let message = text.parse::<DeviceChoice>().expect_err(text);
            assert!(message.contains(&format!("`{text}`")), "{message}");
        }
    }

    #[test]
    fn the_cpu_always_opens() {
        let open = DeviceChoice::default().open().expect("the CPU");
        assert_eq!((open.device, open.choice), (Device::flex(), DeviceChoice::Of(Backend::Cpu, 0)));
    }

    #[test]
    fn auto_opens_whatever_the_machine_has() {
        let open = DeviceChoice::Auto.open().expect("at least the CPU");
        assert_ne!(open.choice, DeviceChoice::Auto);
        assert!(adds(&open.device));
    }

    #[test]
    fn a_device_that_is_not_there_is_an_error_with_a_hint() {
        for backend in Backend::GPUS {
            let error = DeviceChoice::Of(backend, 99).open().expect_err("no machine has a hundred GPUs").to_string();
            assert!(
                error.starts_with(&format!("device is `{backend}:99`")) || error.starts_with(&format!("device is `{backend}`")),
                "{error}"
            );
            assert!(error.contains("\nhint: "), "{error}");
            assert_eq!(error.contains(&format!("--features {backend}")), !backend.is_compiled_in(), "{error}");
        }
    }
}
