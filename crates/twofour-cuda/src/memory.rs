//! Device memory with a known length and data type, which layers read and write.

use std::{marker::PhantomData, ops::Range};

use cudarc::driver::{CudaSlice, DevicePtr as _, result::memcpy_dtod_async};
use twofour::Element;

use crate::{DataType, Device, DevicePtr, Error, Result, context::LayerContext, freed::FreeNote};

/// The address, number and data type of elements.
#[derive(Debug, Clone, Copy)]
struct Region {
    address: DevicePtr,
    len: usize,
    dtype: DataType,
    /// The device's ordinal.
    ordinal: usize,
}

/// Elements in device memory that a call reads.
#[derive(Debug, Clone, Copy)]
pub struct DeviceSlice<'a> {
    region: Region,
    memory: PhantomData<&'a [u8]>,
}

/// Elements in device memory that a call writes.
#[derive(Debug)]
pub struct DeviceSliceMut<'a> {
    region: Region,
    memory: PhantomData<&'a mut [u8]>,
}

/// Owned elements in device memory. They are freed in stream order, on the stream of their [`LayerContext`].
#[derive(Debug)]
pub struct DeviceBuffer {
    region: Region,
    context: LayerContext,
    _freed: FreeNote,
    memory: CudaSlice<u8>,
}

macro_rules! accessors {
    ($($type:ty),*) => {$(
        impl $type {
            /// Returns the number of elements.
            pub fn len(&self) -> usize {
                self.region.len
            }

            /// Returns whether there are no elements.
            pub fn is_empty(&self) -> bool {
                self.region.len == 0
            }

            /// Returns the data type.
            pub fn dtype(&self) -> DataType {
                self.region.dtype
            }

            /// Returns the address, after checking the device, data type and number of elements. It may be null for no
            /// elements.
            pub(crate) fn expect(
                &self,
                what: &'static str,
                context: &LayerContext,
                dtype: DataType,
                len: usize,
            ) -> Result<DevicePtr> {
                self.region.expect(what, context, dtype, len)
            }
        }
    )*};
}

accessors!(DeviceSlice<'_>, DeviceSliceMut<'_>, DeviceBuffer);

impl Region {
    fn expect(self, what: &'static str, context: &LayerContext, dtype: DataType, len: usize) -> Result<DevicePtr> {
        if self.ordinal != context.ordinal() {
            return Err(Error::OtherDevice { what, expected: context.ordinal(), found: self.ordinal });
        }
        if self.dtype != dtype {
            return Err(Error::SliceType { what, expected: dtype, found: self.dtype });
        }
        if self.len != len {
            return Err(Error::Length { what, expected: len, found: self.len });
        }
        Ok(self.address)
    }
}

impl Region {
    /// Returns the same bytes as elements of another type of the same size.
    fn as_type(self, dtype: DataType) -> Result<Self> {
        if dtype.bytes() != self.dtype.bytes() {
            return Err(Error::SliceType { what: "a slice as another type", expected: dtype, found: self.dtype });
        }
        Ok(Self { dtype, ..self })
    }

    /// Returns a part of the elements.
    fn part(self, what: &'static str, range: Range<usize>) -> Result<Self> {
        if range.start > range.end || range.end > self.len {
            return Err(Error::Length { what, expected: range.end, found: self.len });
        }
        let address = self.address + (range.start * self.dtype.bytes()) as u64;
        Ok(Self { address, len: range.len(), ..self })
    }
}

impl<'a> DeviceSlice<'a> {
    /// Returns a part of the elements.
    ///
    /// # Errors
    /// [`Error::Length`] for a range that is not within the slice.
    pub fn part(&self, range: Range<usize>) -> Result<DeviceSlice<'a>> {
        Ok(Self { region: self.region.part("a part of a slice", range)?, memory: PhantomData })
    }
}

impl DeviceSlice<'_> {
    /// Returns the same bits as elements of another type of the same size, such as an f32 whose bits a call wrote as an
    /// id.
    ///
    /// # Errors
    /// [`Error::SliceType`] for a type of another size.
    pub fn as_type(&self, dtype: DataType) -> Result<Self> {
        Ok(Self { region: self.region.as_type(dtype)?, memory: PhantomData })
    }

    /// Returns a slice of borrowed memory, such as another framework's tensor: `len` elements from an address on, which
    /// is a multiple of an element's size.
    ///
    /// # Safety
    /// The memory is on the device, valid and not written until the streams of all calls that it is passed to have
    /// passed those calls.
    pub unsafe fn from_raw(device: &Device, address: DevicePtr, len: usize, dtype: DataType) -> Self {
        Self { region: Region { address, len, dtype, ordinal: device.context().ordinal() }, memory: PhantomData }
    }
}

impl DeviceSliceMut<'_> {
    /// Returns a mutable slice of borrowed memory: `len` elements from an address on, which is a multiple of an
    /// element's size.
    ///
    /// # Safety
    /// The memory is on the device and valid, and nothing else reads or writes it, until the streams of all calls that
    /// it is passed to have passed those calls.
    pub unsafe fn from_raw(device: &Device, address: DevicePtr, len: usize, dtype: DataType) -> Self {
        Self { region: Region { address, len, dtype, ordinal: device.context().ordinal() }, memory: PhantomData }
    }

    /// Returns a part of the elements.
    ///
    /// # Errors
    /// [`Error::Length`] for a range that is not within the slice.
    pub fn part(&mut self, range: Range<usize>) -> Result<DeviceSliceMut<'_>> {
        Ok(DeviceSliceMut { region: self.region.part("a part of a slice", range)?, memory: PhantomData })
    }

    /// Returns the elements before an index, and those from it on.
    ///
    /// # Errors
    /// [`Error::Length`] for an index beyond the end.
    pub fn split_at(self, middle: usize) -> Result<(Self, Self)> {
        let (what, len) = ("a part of a slice", self.region.len);
        let (first, second) = (self.region.part(what, 0..middle)?, self.region.part(what, middle..len)?);
        Ok((Self { region: first, memory: PhantomData }, Self { region: second, memory: PhantomData }))
    }

    /// Returns the same memory as elements of another type of the same size, for a call that overwrites them.
    ///
    /// # Errors
    /// [`Error::SliceType`] for a type of another size.
    pub fn as_type(self, dtype: DataType) -> Result<Self> {
        Ok(Self { region: self.region.as_type(dtype)?, memory: PhantomData })
    }

    /// Reborrows the slice for a shorter time.
    pub fn reborrow(&mut self) -> DeviceSliceMut<'_> {
        DeviceSliceMut { region: self.region, memory: PhantomData }
    }

    /// Reborrows the slice for reading.
    pub fn as_slice(&self) -> DeviceSlice<'_> {
        DeviceSlice { region: self.region, memory: PhantomData }
    }
}

impl DeviceBuffer {
    /// Returns a buffer of zeros.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Driver`]; [`Error::Capturing`] while the stream is being captured.
    pub fn zeros(context: &LayerContext, dtype: DataType, len: usize) -> Result<Self> {
        let bytes = len.checked_mul(dtype.bytes()).ok_or(Error::OutOfMemory { action: "allocating a buffer" })?;
        let memory = context.allocate(bytes)?;
        let address = memory.device_ptr(context.stream()).0;
        let region = Region { address, len, dtype, ordinal: context.ordinal() };
        Ok(Self { region, context: context.clone(), _freed: context.free_note(), memory })
    }

    /// Copies host memory to the device and synchronizes the stream.
    ///
    /// # Errors
    /// Those of [`DeviceBuffer::zeros`].
    pub fn from_host<T: Element>(context: &LayerContext, values: &[T]) -> Result<Self> {
        let mut buffer = Self::zeros(context, T::DTYPE, values.len())?;
        buffer.write(values)?;
        Ok(buffer)
    }

    /// Returns a copy of some elements on the device, made in stream order.
    ///
    /// # Errors
    /// [`Error::Length`] for a range that is not within the buffer; those of [`DeviceBuffer::zeros`].
    pub fn copied(&self, range: Range<usize>) -> Result<Self> {
        let part = self.region.part("a part of a buffer", range.clone())?;
        let copy = Self::zeros(&self.context, part.dtype, part.len)?;
        if part.len > 0 {
            let (stream, bytes) = (self.context.stream().cu_stream(), part.len * part.dtype.bytes());
            self.context.device().bind()?;
            // SAFETY: both are so long, and the stream is of their device.
            unsafe { memcpy_dtod_async(copy.region.address, part.address, bytes, stream) }
                .map_err(|error| Error::driver("copying device memory", error))?;
        }
        Ok(copy)
    }

    /// Copies ids to the device, where their bits are elements of [`DataType::I32`], and synchronizes the stream.
    ///
    /// # Errors
    /// Those of [`DeviceBuffer::zeros`].
    pub fn from_ids(context: &LayerContext, ids: &[u32]) -> Result<Self> {
        let mut buffer = Self::zeros(context, DataType::I32, ids.len())?;
        buffer.write_ids(ids)?;
        Ok(buffer)
    }

    /// Overwrites the ids and synchronizes the stream.
    ///
    /// # Errors
    /// Those of [`DeviceBuffer::write`].
    pub fn write_ids(&mut self, ids: &[u32]) -> Result<()> {
        self.expect("the ids", &self.context, DataType::I32, ids.len())?;
        self.write_bytes(bytemuck::cast_slice(ids))
    }

    /// Launches the copy of ids to the device, and returns once they have been copied from host memory: the stream is
    /// not synchronized.
    ///
    /// # Errors
    /// Those of [`DeviceBuffer::write`]; [`Error::Capturing`] while the stream is being captured, because a graph would
    /// repeat the ids.
    pub fn enqueue_ids(&mut self, ids: &[u32]) -> Result<()> {
        self.expect("the ids", &self.context, DataType::I32, ids.len())?;
        self.context.expect_not_capturing("copying ids")?;
        let (bytes, stream): (&[u8], _) = (bytemuck::cast_slice(ids), self.context.stream().clone());
        let copied = stream.memcpy_htod(bytes, &mut self.memory.slice_mut(..bytes.len()));
        copied.map_err(|error| Error::driver("copying to the device", error))
    }

    /// Returns a copy of ids in host memory; synchronizes the stream.
    ///
    /// # Errors
    /// Those of [`DeviceBuffer::to_host`].
    pub fn ids_to_host(&self) -> Result<Vec<u32>> {
        self.expect("the ids", &self.context, DataType::I32, self.len())?;
        let mut ids = vec![0; self.len()];
        self.read_bytes(bytemuck::cast_slice_mut(&mut ids))?;
        Ok(ids)
    }

    /// Overwrites the elements with those of host memory and synchronizes the stream.
    ///
    /// # Errors
    /// [`Error::Length`] and [`Error::SliceType`] where number or type differ, [`Error::Driver`].
    pub fn write<T: Element>(&mut self, values: &[T]) -> Result<()> {
        self.expect("the buffer", &self.context, T::DTYPE, values.len())?;
        self.write_bytes(bytemuck::cast_slice(values))
    }

    fn write_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        let stream = self.context.stream().clone();
        let failed = |error| Error::driver("copying to the device", error);
        stream.memcpy_htod(bytes, &mut self.memory.slice_mut(..bytes.len())).map_err(failed)?;
        stream.synchronize().map_err(failed)
    }

    /// Returns a copy in host memory; synchronizes the stream.
    ///
    /// # Errors
    /// [`Error::SliceType`] where the elements have another type, [`Error::Driver`].
    pub fn to_host<T: Element>(&self) -> Result<Vec<T>> {
        self.expect("the buffer", &self.context, T::DTYPE, self.len())?;
        let mut values = vec![T::ZERO; self.len()];
        self.read_bytes(bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }

    fn read_bytes(&self, bytes: &mut [u8]) -> Result<()> {
        let (len, stream) = (bytes.len(), self.context.stream());
        let failed = |error| Error::driver("copying from the device", error);
        stream.memcpy_dtoh(&self.memory.slice(..len), bytes).map_err(failed)?;
        stream.synchronize().map_err(failed)
    }

    /// Returns the elements for reading.
    pub fn as_slice(&self) -> DeviceSlice<'_> {
        DeviceSlice { region: self.region, memory: PhantomData }
    }

    /// Returns the elements for writing.
    pub fn as_slice_mut(&mut self) -> DeviceSliceMut<'_> {
        DeviceSliceMut { region: self.region, memory: PhantomData }
    }
}
