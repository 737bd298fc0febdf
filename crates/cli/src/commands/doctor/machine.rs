//! The machine, as far as the system tells, and why a backend may see no device.

use super::gib;
use serde::Serialize;
use std::fmt;
use std::path::Path;
use wan::device::Backend;

/// The processor and its memory.
#[derive(Debug, Serialize)]
pub(super) struct Machine {
    /// What the processor calls itself.
    cpu: Option<String>,
    /// Threads that a run uses.
    threads: usize,
    /// The widest vector instructions the engine has code for that this processor has.
    vectors: Option<&'static str>,
    memory_bytes: Option<u64>,
    available_bytes: Option<u64>,
}

impl Machine {
    /// Asks the system.
    pub(super) fn look() -> Self {
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        Self {
            cpu: field(&cpuinfo, "model name").map(str::to_owned),
            threads: rayon::current_num_threads(),
            vectors: vectors(),
            memory_bytes: kibibytes(&meminfo, "MemTotal"),
            available_bytes: kibibytes(&meminfo, "MemAvailable"),
        }
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cpu = self.cpu.as_deref().unwrap_or(std::env::consts::ARCH);
        let vectors = self.vectors.unwrap_or("no AVX2: slow");
        write!(f, "processor  {cpu}, {} threads, {vectors}", self.threads)?;
        if let (Some(all), Some(free)) = (self.memory_bytes, self.available_bytes) {
            write!(f, "\nmemory     {:.1} GiB, {:.1} GiB available", gib(all), gib(free))?;
        }
        Ok(())
    }
}

#[cfg(target_arch = "x86_64")]
fn vectors() -> Option<&'static str> {
    let wide = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vl");
    let usual = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    if wide { Some("AVX-512") } else { usual.then_some("AVX2") }
}

#[cfg(not(target_arch = "x86_64"))]
fn vectors() -> Option<&'static str> {
    cfg!(target_arch = "aarch64").then_some("NEON")
}

/// What follows `NAME :` in a file of /proc.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let of_name = |line: &'a str| line.split_once(':').filter(|(key, _)| key.trim() == name).map(|(_, value)| value.trim());
    text.lines().find_map(of_name)
}

fn kibibytes(text: &str, name: &str) -> Option<u64> {
    field(text, name)?.strip_suffix(" kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}

/// What is likely to be missing where a backend lists no device.
pub(super) fn no_device(backend: Backend) -> String {
    let there = |path: &str| Path::new(path).exists();
    match backend {
        Backend::Cuda if !there("/proc/driver/nvidia/version") => {
            "the NVIDIA kernel driver is not loaded: install the driver, and in a container start it with the GPU passed through (`--gpus all`)"
        }
        Backend::Cuda => "the NVIDIA kernel driver is loaded, but `libcuda.so.1` is not found or lists no GPU: does `nvidia-smi` work, is `CUDA_VISIBLE_DEVICES` set?",
        Backend::Rocm if !there("/dev/kfd") => "there is no `/dev/kfd`: the AMD kernel driver is not loaded, or the container was started without the device",
        Backend::Rocm => "`/dev/kfd` is there, but HIP lists no GPU: does `rocminfo` work, and may this user open the device?",
        Backend::Vulkan | Backend::Wgpu if !ICD_FOLDERS.into_iter().any(holds_files) => {
            "no Vulkan driver is installed: install that of the GPU's maker, or for tests `mesa-vulkan-drivers`, which computes on the processor"
        }
        Backend::Vulkan | Backend::Wgpu => "a Vulkan driver is installed, but offers no device: are `libvulkan1` and the rights on `/dev/dri` there? `vulkaninfo --summary` tells more",
        Backend::Metal => "Metal is there on Apple machines only",
        Backend::Cpu => "the CPU is always there",
    }
    .to_owned()
}

/// Where Vulkan's loader looks for drivers.
const ICD_FOLDERS: [&str; 3] = ["/usr/share/vulkan/icd.d", "/etc/vulkan/icd.d", "/usr/local/share/vulkan/icd.d"];

fn holds_files(folder: &str) -> bool {
    std::fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_linux_writes() {
        let cpuinfo = "processor\t: 0\nmodel name\t: A Processor @ 2.0GHz\n\nprocessor\t: 1\nmodel name\t: Another\n";
        assert_eq!(field(cpuinfo, "model name"), Some("A Processor @ 2.0GHz"));
        assert_eq!(field(cpuinfo, "name"), None);
        assert_eq!(kibibytes("MemTotal:       24617484 kB\nMemFree:  1 kB\n", "MemTotal"), Some(24_617_484 << 10));
        assert_eq!(kibibytes("MemTotal: many\n", "MemTotal"), None);
    }
}
