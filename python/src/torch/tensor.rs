//! A tensor of torch, as a kernel sees it.

use std::{borrow::Cow, ptr, slice};

use bytemuck::Pod;

use super::{
    failure::{Failure, Result},
    scalar_type::ScalarType,
    shim::{Handle, shim},
};

/// An owned reference to a tensor.
#[derive(Debug)]
pub(crate) struct Tensor(Handle);

impl Drop for Tensor {
    fn drop(&mut self) {
        // SAFETY: the handle is owned and valid.
        unsafe { (shim().aoti_torch_delete_tensor_object)(self.0) };
    }
}

/// Calls a function of the interface that stores one result.
macro_rules! get {
    ($function:ident, $handle:expr, $initial:expr) => {{
        let mut value = $initial;
        // SAFETY: the handle is a live tensor, and `value` has the type that the function stores.
        let status = unsafe { (shim().$function)($handle, &mut value) };
        debug_assert_eq!(status, 0);
        value
    }};
}

impl Tensor {
    /// Takes over a handle.
    ///
    /// # Safety
    /// The handle is a live tensor that nobody else deletes.
    pub(crate) unsafe fn from_handle(handle: Handle) -> Self {
        Tensor(handle)
    }

    /// Gives the handle away.
    pub(crate) fn into_handle(self) -> Handle {
        let handle = self.0;
        std::mem::forget(self);
        handle
    }

    /// The shape.
    pub(crate) fn sizes(&self) -> &[i64] {
        let rank = get!(aoti_torch_get_dim, self.0, 0i64) as usize;
        let pointer = get!(aoti_torch_get_sizes, self.0, ptr::null_mut());
        if rank == 0 {
            return &[];
        }
        // SAFETY: torch keeps `rank` numbers as long as the tensor lives with its shape.
        unsafe { slice::from_raw_parts(pointer, rank) }
    }

    /// The number of elements.
    pub(crate) fn numel(&self) -> usize {
        self.sizes().iter().product::<i64>() as usize
    }

    /// The type of the elements.
    ///
    /// # Errors
    /// A `TypeError` for a type that no kernel takes.
    pub(crate) fn dtype(&self) -> Result<ScalarType> {
        let number = get!(aoti_torch_get_dtype, self.0, -1i32);
        ScalarType::of(number.into()).ok_or_else(|| {
            Failure::not_implemented(format!(
                "tensors of {} are not supported; use float32, bfloat16 or float16",
                ScalarType::name_of(number.into())
            ))
        })
    }

    fn is_contiguous(&self) -> bool {
        get!(aoti_torch_is_contiguous, self.0, false)
    }

    fn data_ptr(&self) -> *mut u8 {
        get!(aoti_torch_get_data_ptr, self.0, ptr::null_mut()).cast()
    }

    /// Rows and columns of a matrix.
    ///
    /// # Errors
    /// A `RuntimeError` for another rank.
    pub(crate) fn matrix(&self, what: &str) -> Result<(usize, usize)> {
        match self.sizes() {
            [rows, cols] => Ok((*rows as usize, *cols as usize)),
            other => Err(Failure::runtime(format!("{what} must have 2 dimensions, not {}", other.len()))),
        }
    }

    /// The bytes of a contiguous tensor in the host's memory.
    ///
    /// # Errors
    /// A `RuntimeError` where it is not contiguous.
    pub(crate) fn bytes(&self, what: &str) -> Result<&[u8]> {
        if !self.is_contiguous() {
            return Err(Failure::runtime(format!("{what} must be contiguous")));
        }
        let len = self.numel() * self.dtype()?.bytes();
        if len == 0 {
            return Ok(&[]);
        }
        // SAFETY: a contiguous tensor is `len` bytes of initialized memory, which the tensor keeps alive. Kernels are
        // registered for the key "CPU" only, so it is the host's memory. As for every operator of torch, nobody writes
        // to an argument meanwhile.
        Ok(unsafe { slice::from_raw_parts(self.data_ptr(), len) })
    }

    /// The elements of a tensor in the host's memory, row-major: borrowed where they lie so, copied otherwise.
    ///
    /// # Errors
    /// A `TypeError` for another element type than `expected`, whose Rust type is `T`.
    pub(crate) fn elements<T: Pod>(&self, what: &str, expected: ScalarType) -> Result<Cow<'_, [T]>> {
        let found = self.dtype()?;
        if found != expected {
            let (expected, found) = (expected.name(), found.name());
            return Err(Failure::not_implemented(format!("{what} has dtype {found}; {expected} is required")));
        }
        debug_assert_eq!(expected.bytes(), size_of::<T>());
        if self.is_contiguous() {
            let bytes = self.bytes(what)?;
            return Ok(match bytemuck::try_cast_slice(bytes) {
                Ok(elements) => Cow::Borrowed(elements),
                Err(_) => Cow::Owned(bytemuck::pod_collect_to_vec(bytes)),
            });
        }
        let copy = self.copied_to(Device::HOST, what)?;
        Ok(Cow::Owned(bytemuck::pod_collect_to_vec(copy.bytes(what)?)))
    }

    /// Where the tensor lies.
    pub(crate) fn device(&self) -> Device {
        let (kind, index) =
            (get!(aoti_torch_get_device_type, self.0, 0i32), get!(aoti_torch_get_device_index, self.0, 0i32));
        Device { kind, index: if kind == Device::HOST.kind { 0 } else { index } }
    }

    /// A new, contiguous tensor in the host's memory with unspecified contents, from torch's allocator.
    ///
    /// # Errors
    /// A `RuntimeError` where torch has no memory.
    pub(crate) fn empty(sizes: &[i64], dtype: ScalarType) -> Result<Self> {
        Self::empty_on(Device::HOST, sizes, dtype)
    }

    /// The same on a device.
    ///
    /// # Errors
    /// Those of [`Tensor::empty`].
    pub(crate) fn empty_on(device: Device, sizes: &[i64], dtype: ScalarType) -> Result<Self> {
        let mut strides = [0i64; MAX_RANK];
        if sizes.len() > MAX_RANK {
            return Err(Failure::runtime(format!("{} dimensions are more than {MAX_RANK}", sizes.len())));
        }
        let mut stride = 1;
        for (size, out) in sizes.iter().zip(&mut strides).rev() {
            *out = stride;
            stride *= size.max(&1);
        }
        let mut handle = ptr::null_mut();
        // SAFETY: `sizes` and `strides` have at least that many numbers.
        let status = unsafe {
            (shim().aoti_torch_empty_strided)(
                sizes.len() as i64,
                sizes.as_ptr(),
                strides.as_ptr(),
                dtype as i32,
                device.kind,
                device.index,
                &mut handle,
            )
        };
        if status != 0 {
            return Err(Failure::runtime(format!("torch could not allocate a tensor of shape {sizes:?}")));
        }
        Ok(Tensor(handle))
    }

    /// A contiguous tensor with the same elements: a copy where this one is not contiguous, by torch.
    ///
    /// # Errors
    /// A `RuntimeError` where torch cannot copy.
    pub(crate) fn contiguous(&self, what: &str) -> Result<Contiguous<'_>> {
        if self.is_contiguous() {
            return Ok(Contiguous::Same(self));
        }
        self.copied_to(self.device(), what).map(Contiguous::Copy)
    }

    /// A contiguous tensor with the same elements at an address that is a multiple of 16, as copies of 16 bytes need.
    ///
    /// # Errors
    /// Those of [`Tensor::contiguous`].
    pub(crate) fn contiguous_and_aligned(&self, what: &str) -> Result<Contiguous<'_>> {
        match self.contiguous(what)? {
            Contiguous::Same(tensor) if !tensor.address().is_multiple_of(16) => {
                tensor.copied_to(tensor.device(), what).map(Contiguous::Copy)
            }
            contiguous => Ok(contiguous),
        }
    }

    /// A contiguous copy on a device. To the host's memory it waits for the work that computes the tensor.
    ///
    /// # Errors
    /// A `RuntimeError` where torch cannot copy.
    pub(crate) fn copied_to(&self, device: Device, what: &str) -> Result<Tensor> {
        let copy = Tensor::empty_on(device, self.sizes(), self.dtype()?)?;
        // SAFETY: both handles are live tensors of the same shape.
        let status = unsafe { (shim().aoti_torch_copy_)(copy.0, self.0, 0) };
        if status != 0 {
            return Err(Failure::runtime(format!("torch could not copy {what}")));
        }
        Ok(copy)
    }

    /// A matrix over the same memory, from the first element on.
    ///
    /// # Errors
    /// A `RuntimeError` where the matrix does not fit the memory.
    pub(crate) fn as_matrix(&self, sizes: (usize, usize), strides: (usize, usize)) -> Result<Tensor> {
        self.view(&[sizes.0 as i64, sizes.1 as i64], &[strides.0 as i64, strides.1 as i64])
    }

    /// The elements of a contiguous tensor as one dimension, over the same memory.
    ///
    /// # Errors
    /// Those of [`Tensor::as_matrix`].
    pub(crate) fn flat(&self) -> Result<Tensor> {
        self.view(&[self.numel() as i64], &[1])
    }

    fn view(&self, sizes: &[i64], strides: &[i64]) -> Result<Tensor> {
        let rank = sizes.len().min(strides.len()) as i64;
        let mut handle = ptr::null_mut();
        // SAFETY: the handle is a live tensor; sizes and strides are `rank` numbers.
        let status = unsafe {
            (shim().aoti_torch__reinterpret_tensor)(self.0, rank, sizes.as_ptr(), strides.as_ptr(), 0, &mut handle)
        };
        if status != 0 {
            return Err(Failure::runtime(format!(
                "torch has no view of shape {sizes:?} of a tensor of shape {:?}",
                self.sizes()
            )));
        }
        Ok(Tensor(handle))
    }

    /// Computes `self = a · b`, and `+ bias` where there is one, by torch's dense GEMM.
    ///
    /// # Errors
    /// A `RuntimeError` where torch cannot multiply them.
    pub(crate) fn set_product(&mut self, a: &Tensor, b: &Tensor, bias: Option<&Tensor>) -> Result<()> {
        // SAFETY: all handles are live tensors.
        let status = unsafe {
            match bias {
                Some(bias) => (shim().aoti_torch_addmm_out)(self.0, bias.0, a.0, b.0, 1.0, 1.0),
                None => (shim().aoti_torch_mm_out)(self.0, a.0, b.0),
            }
        };
        if status != 0 {
            let (a, b) = (a.sizes(), b.sizes());
            return Err(Failure::runtime(format!("torch could not multiply matrices of shapes {a:?} and {b:?}")));
        }
        Ok(())
    }

    /// The address of the first element, in the memory of the tensor's device.
    pub(crate) fn address(&self) -> u64 {
        self.data_ptr().addr() as u64
    }

    /// The bytes of a tensor that [`Tensor::empty`] made and nobody else has seen.
    pub(crate) fn bytes_mut(&mut self) -> Result<&mut [u8]> {
        let len = self.numel() * self.dtype()?.bytes();
        if len == 0 {
            return Ok(&mut []);
        }
        let pointer = self.data_ptr();
        // SAFETY: the tensor is contiguous memory of `len` bytes that only this handle reaches. It comes from torch's
        // allocator, behind a call that the compiler cannot see through, so its contents are some bytes.
        Ok(unsafe { slice::from_raw_parts_mut(pointer, len) })
    }

    /// The elements of contiguous tensors that the operator's schema marks as written: all of one type, none of which
    /// shares memory with another of them or with those that are `read`.
    ///
    /// # Errors
    /// A `NotImplementedError` for another type than `expected`, a `RuntimeError` for a tensor that is not contiguous,
    /// that is not aligned, or whose memory is that of another.
    pub(crate) fn written<'a, T: Pod, const N: usize>(
        tensors: [(&'a mut Tensor, &str); N],
        read: &[&Tensor],
        expected: ScalarType,
    ) -> Result<[&'a mut [T]; N]> {
        debug_assert_eq!(expected.bytes(), size_of::<T>());
        let mut taken: Vec<std::ops::Range<u64>> = Vec::with_capacity(N + read.len());
        for tensor in read {
            taken.push(tensor.address()..tensor.address() + (tensor.numel() * tensor.dtype()?.bytes()) as u64);
        }
        for (tensor, what) in &tensors {
            let found = tensor.dtype()?;
            if found != expected {
                let (expected, found) = (expected.name(), found.name());
                return Err(Failure::not_implemented(format!("{what} has dtype {found}; {expected} is required")));
            }
            let range = tensor.address()..tensor.address() + (tensor.numel() * size_of::<T>()) as u64;
            if !tensor.is_contiguous() || !range.start.is_multiple_of(align_of::<T>() as u64) {
                return Err(Failure::runtime(format!("{what} is written in place and must be contiguous and aligned")));
            }
            if taken.iter().any(|other| other.start < range.end && range.start < other.end) {
                return Err(Failure::runtime(format!(
                    "{what} is written in place and shares memory with another operand"
                )));
            }
            taken.push(range);
        }
        Ok(tensors.map(|(tensor, _)| match tensor.numel() {
            0 => &mut [][..],
            // SAFETY: the tensor is `len` contiguous, aligned elements of `T`, which has no invalid bits; no other
            // operand reaches them, as was checked above, and the borrow of the handle keeps the memory alive.
            len => unsafe { slice::from_raw_parts_mut(tensor.data_ptr().cast::<T>(), len) },
        }))
    }

    /// The elements of a tensor of [`Tensor::bytes_mut`].
    pub(crate) fn elements_mut<T: Pod>(&mut self) -> Result<&mut [T]> {
        let bytes = self.bytes_mut()?;
        // An empty slice has no address that would be aligned.
        Ok(if bytes.is_empty() { &mut [] } else { bytemuck::cast_slice_mut(bytes) })
    }
}

/// A tensor, or its contiguous copy.
#[derive(Debug)]
pub(crate) enum Contiguous<'a> {
    /// The tensor was contiguous.
    Same(&'a Tensor),
    /// It was copied.
    Copy(Tensor),
}

impl std::ops::Deref for Contiguous<'_> {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        match self {
            Contiguous::Same(tensor) => tensor,
            Contiguous::Copy(tensor) => tensor,
        }
    }
}

/// A device of torch's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Device {
    /// `c10::DeviceType`: 0 is the CPU, 1 is CUDA.
    kind: i32,
    /// The number of the GPU.
    pub(crate) index: i32,
}

impl Device {
    /// The host's memory.
    pub(crate) const HOST: Device = Device { kind: 0, index: 0 };

    /// Whether it is a GPU of NVIDIA's.
    pub(crate) fn is_cuda(self) -> bool {
        self.kind == 1
    }
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.kind {
            0 => f.write_str("cpu"),
            1 => write!(f, "cuda:{}", self.index),
            other => write!(f, "device type {other}, index {}", self.index),
        }
    }
}

/// The most dimensions that a result has.
const MAX_RANK: usize = 8;

/// The number of threads that torch computes with.
pub(crate) fn torch_threads() -> usize {
    let mut threads = 1u32;
    // SAFETY: the function stores a `u32`.
    unsafe { (shim().torch_get_num_threads)(&mut threads) };
    (threads as usize).max(1)
}
