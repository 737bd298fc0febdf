//! The engine's fused attention: FlashAttention (Dao et al. 2022) on matrix units, for the forward pass in half precision.
//!
//! Nothing of size L x T is ever in memory. Factors are f16, whose 10 bits are more than bf16 has; scores, softmax and sums are f32.
//! Backward goes through `attention::gradients` in chunks. The kernel is tried once for each kind of device, dtype and head, against the chunks.
//!
//! Legend: as `attention`.

use super::attention::{in_chunks, query_rows};
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::{DType, FloatDType, Tensor, TensorData};
use burn_cubecl::kernel::attention::flash_attention;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::kernel::matmul::{MatmulStrategy, matmul};
use burn_cubecl::kernel::reduce::{KernelReduceStrategy, reduce_dim};
use cubecl::ir::{ElemType, FloatKind};
use cubek::attention::forward::launch::{BlueprintStrategy, Strategy};
use cubek::attention::forward::routines::blackbox_accelerated::BlackboxAcceleratedStrategy;
use cubek::reduce::components::instructions::ReduceOperationConfig;
use cubek::reduce::launch::{ReduceStrategy, RoutineStrategy, VectorizationStrategy};
use cubek::reduce::routines::BlueprintStrategy as ReduceBlueprint;
use cubek::reduce::routines::cube::CubeStrategy;
use cubek::reduce::routines::plane::PlaneStrategy;
use grpo::random::{Key, Purpose};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

/// Query rows are given to the kernel in multiples of what a group of threads takes: at most this.
const ROWS: usize = 128;
/// Planes (warps) of a group, in the order of preference: keys and values are fetched once for each group.
const PLANES: [u8; 4] = [8, 4, 2, 1];
/// Largest difference from the chunks, relative to the largest value: a few units of the last bit of f16, or of bf16.
const TOLERANCE: f64 = 2e-2;

type Values = FloatTensor<Cube>;

/// q [B, H, L, d], k and v [B, H, T, d] -> [B, H, L, d]; nothing where the device has no matrix units for it, or they do not agree with the chunks.
pub(super) fn attend(q: &Values, k: &Values, v: &Values, bias: &Values) -> Option<Values> {
    let [.., l, _] = q.shape().dims::<4>();
    let planes = planes(q)?;
    let whole = l / ROWS * ROWS;
    let fused = launch(query_rows::<Cube>(q, 0..whole), k.clone(), v.clone(), planes)?;
    if whole == l {
        return Some(fused);
    }
    let rest = in_chunks::<Cube>(query_rows::<Cube>(q, whole..l), k.clone(), v.clone(), bias.clone());
    Some(Cube::float_cat(vec![fused, rest], 2))
}

/// The planes of a kernel for queries like `q` which computes what the chunks compute, if there is one.
pub(super) fn planes(q: &Values) -> Option<u8> {
    static TRIED: Mutex<BTreeMap<(String, usize), Option<u8>>> = Mutex::new(BTreeMap::new());
    let [.., l, d] = q.shape().dims::<4>();
    if !matches!(q.dtype(), DType::BF16 | DType::F16) || l < ROWS || !d.is_multiple_of(16) || !has_matrix_units(q) {
        return None;
    }
    let kind = (format!("{:?} {:?}", q.device, q.dtype()), d);
    let mut tried = TRIED.lock().unwrap_or_else(PoisonError::into_inner);
    *tried.entry(kind).or_insert_with(|| {
        // what a kernel asks for is known to be too much when it is launched
        let agrees = |&planes: &u8| catch_unwind(AssertUnwindSafe(|| agrees(q, d, planes))).unwrap_or(false);
        PLANES.into_iter().find(agrees)
    })
}

/// a b in f32. Factors in half precision are multiplied by matrix units as they are, and the f32 sums are what is written.
pub(super) fn wide_product(a: Values, b: Values) -> Values {
    // that no kernel suits is said before anything runs
    let product = matmul(a.clone(), b.clone(), None, MatmulStrategy::default(), DType::F32);
    product.unwrap_or_else(|_| Cube::float_cast(Cube::float_matmul(a, b), FloatDType::F32))
}

/// softmax over the last of four axes. By itself the engine gives a row to one thread: of 4,096 rows of 32,760 keys few of a card's processors would
/// have any.
pub(super) fn softmax_of_rows(x: Values) -> Values {
    let max = reduced_rows(&x, ReduceOperationConfig::Max);
    let powers = Cube::float_exp(Cube::float_sub(x, max));
    let sum = reduced_rows(&powers, ReduceOperationConfig::Sum);
    Cube::float_div(powers, sum)
}

/// Rows are reduced by groups of threads from this length on, shorter ones by a plane.
const LONG_ROW: usize = 4096;

/// [B, H, L, T] -> [B, H, L, 1]; as the engine does it by itself where there are no planes.
fn reduced_rows(x: &Values, operation: ReduceOperationConfig) -> Values {
    let [.., keys] = x.shape().dims::<4>();
    let routine = if keys >= LONG_ROW {
        RoutineStrategy::Cube(ReduceBlueprint::Inferred(CubeStrategy { use_planes: true }))
    } else {
        RoutineStrategy::Plane(ReduceBlueprint::Inferred(PlaneStrategy { independent: true }))
    };
    let vectorization = VectorizationStrategy { parallel_output_vectorization: false };
    let strategy = ReduceStrategy { routine, vectorization, autotune_level: Default::default() };
    let reduce = |strategy| reduce_dim(x.clone(), None, 3, strategy, operation);
    reduce(KernelReduceStrategy::Specific(strategy))
        .or_else(|_| reduce(KernelReduceStrategy::Unspecified))
        .unwrap_or_else(|_| unreachable!("there is a fourth axis"))
}

/// The same values, one row after the other.
pub(super) fn in_order(x: Values) -> Values {
    into_contiguous(x)
}

/// Products of f16 with f32 sums.
fn has_matrix_units(q: &Values) -> bool {
    let [f16, f32] = [FloatKind::F16, FloatKind::F32].map(ElemType::Float);
    let products = &q.client.properties().features.matmul.cmma;
    products.iter().any(|product| product.a_type == f16 && product.b_type == f16 && product.cd_type == f32)
}

/// Compares with the chunks on normal deviates.
fn agrees(like: &Values, d: usize, planes: u8) -> bool {
    let normal = |index: u64, rows: usize| {
        let key = Key { seed: 0, iteration: 0, prompt: index, rollout: 0, purpose: Purpose::Data };
        let values = Cube::float_from_data(TensorData::new(key.normals(2 * rows * d), [1, 2, rows, d]), &like.device);
        Cube::float_cast(values, FloatDType::from(like.dtype()))
    };
    // keys that fill no tile
    let (q, k, v) = (normal(1, ROWS), normal(2, ROWS + 9), normal(3, ROWS + 9));
    let read = |x: Values| -> Option<Vec<f32>> {
        Tensor::<4>::from_primitive::<Cube>(x).try_into_data().ok()?.convert::<f32>().try_into_vec().ok()
    };
    let Some(fused) = launch(q.clone(), k.clone(), v.clone(), planes).and_then(read) else { return false };
    let no_bias = Cube::float_zeros([1; 4].into(), &like.device, FloatDType::F32);
    let Some(chunks) = read(in_chunks::<Cube>(q, k, v, no_bias)) else { return false };
    let largest = |values: &mut dyn Iterator<Item = f32>| f64::from(values.fold(0.0_f32, |most, value| most.max(value.abs())));
    let finite = fused.iter().all(|value| value.is_finite());
    finite && largest(&mut fused.iter().zip(&chunks).map(|(a, b)| a - b)) <= TOLERANCE * largest(&mut chunks.iter().copied())
}

/// The kernel; nothing if it does not suit the sizes. Its queries are f16, and so is what it gives: of bf16 only numbers beyond 65,504 have no room there,
/// which no activation of these networks comes near.
fn launch(q: Values, k: Values, v: Values, num_planes: u8) -> Option<Values> {
    let dtype = FloatDType::from(q.dtype());
    let [q, k, v] = [q, k, v].map(|x| into_contiguous(if x.dtype() == DType::F16 { x } else { Cube::float_cast(x, FloatDType::F16) }));
    let strategy = BlackboxAcceleratedStrategy { num_planes, seq_q: 1, seq_kv: 1 };
    let strategy = Strategy::BlackboxAccelerated(BlueprintStrategy::Inferred(strategy));
    let output = flash_attention(q, k, v, None, None, Default::default(), strategy).ok()?;
    Some(if dtype == FloatDType::F16 { output } else { Cube::float_cast(output, dtype) })
}
