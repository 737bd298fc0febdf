//! The device that the tests against golden tensors run on, and what it may differ by.

use burn::tensor::{DType, Device};
use wan::device::{Backend, DeviceChoice, is_cpu, tolerance};

/// What `FLASH_GRPO_TEST_DEVICE` names, as `--device` does; else the CPU.
pub fn device() -> Device {
    choice().open().unwrap_or_else(|e| panic!("{e}")).device
}

fn choice() -> DeviceChoice {
    let name = std::env::var("FLASH_GRPO_TEST_DEVICE").unwrap_or_default();
    if name.is_empty() { DeviceChoice::default() } else { name.parse().unwrap_or_else(|e| panic!("FLASH_GRPO_TEST_DEVICE: {e}")) }
}

/// The relative tolerance of the CPU there; elsewhere no less than what a device may differ by ([`tolerance`]).
pub fn allowed(cpu: f64) -> f64 {
    match choice() {
        DeviceChoice::Of(Backend::Cpu, _) => cpu,
        DeviceChoice::Of(backend, _) => cpu.max(tolerance(backend)),
        DeviceChoice::Auto => cpu.max(tolerance(Backend::Cuda)),
    }
}

/// Whether the tests run on the CPU, where equal means equal to the last bit.
pub fn on_cpu() -> bool {
    is_cpu(&device())
}

/// What frozen weights can be beside f32 there: bf16, else f16 (WGSL and Mesa's software driver have no bf16), which goes through the same casts and is
/// rounded to more bits; nothing where there is neither.
#[allow(clippy::print_stderr, reason = "a test that does nothing says why")]
pub fn half() -> Option<DType> {
    let device = device();
    let half = [DType::BF16, DType::F16].into_iter().find(|dtype| device.supports_dtype(*dtype));
    if half.is_none() {
        eprintln!("skipped: the device has neither bf16 nor f16");
    }
    half
}
