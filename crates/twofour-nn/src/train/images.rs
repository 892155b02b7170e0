//! The images that a model is trained on.

use std::path::Path;

use super::{
    Batch, TrainingData,
    idx::{Idx, IdxError},
    passes::drawn,
};
use crate::{Error, Result, block::BatchShape, engine::Engine, model::Vit, random::Stream};

/// Images with their classes, divided at random, but always the same, into a training part and a validation part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageSet {
    /// Height, width, channels.
    shape: [usize; 3],
    pixels: Vec<u8>,
    labels: Vec<u8>,
    /// Numbers of images.
    training: Vec<u32>,
    validation: Vec<u32>,
}

impl ImageSet {
    /// Images of `[height, width, channels]` one after the other, with a label for each. `validation_share` of them
    /// (rounded down) is for validation.
    ///
    /// # Errors
    /// [`Error::Setting`] for a share outside 0 to 0.5, or images without pixels; [`Error::Operation`] where pixels and
    /// labels are not of one number of images.
    pub fn new(shape: [usize; 3], pixels: Vec<u8>, labels: Vec<u8>, validation_share: f64) -> Result<Self> {
        if !(0.0..=0.5).contains(&validation_share) {
            let found = validation_share.to_string();
            return Err(Error::Setting {
                what: "share of the images for validation",
                found,
                expected: "from 0 to 0.5",
            });
        }
        let size: usize = shape.iter().product();
        if size == 0 {
            let found = format!("{shape:?}");
            return Err(Error::Setting { what: "height, width and channels", found, expected: "at least 1 each" });
        }
        if pixels.len() != labels.len() * size {
            return Err(Error::length("pixels of images", labels.len() * size, pixels.len()));
        }
        // By a stream of its own: files may be sorted by class, and runs of all seeds are to be validated on the same
        // images.
        let stream = Stream::new(0, "validation images");
        let mut training: Vec<u32> = (0..labels.len() as u32).collect();
        training.sort_by_key(|image| stream.bits(u64::from(*image)));
        let validation = training.split_off(labels.len() - (labels.len() as f64 * validation_share) as usize);
        Ok(ImageSet { shape, pixels, labels, training, validation })
    }

    /// Reads images and labels of `classes` classes from two IDX files, as they are or in gzip.
    ///
    /// # Errors
    /// Those of [`Idx::images`] and [`Idx::labels`]; other numbers of labels than of images; a label beyond the
    /// classes; those of [`ImageSet::new`].
    pub fn read(images: &Path, labels: &Path, classes: usize, validation_share: f64) -> Result<Self> {
        let (Idx { sizes, values }, Idx { values: found, .. }) = (Idx::images(images)?, Idx::labels(labels)?);
        let shape = [sizes[1], sizes[2], sizes.get(3).copied().unwrap_or(1)];
        if sizes[0] != found.len() {
            let (images_path, labels_path) = (images.to_owned(), labels.to_owned());
            return Err(IdxError::Counts { images_path, images: sizes[0], labels_path, labels: found.len() }.into());
        }
        if let Some((index, &label)) = found.iter().enumerate().find(|(_, label)| usize::from(**label) >= classes) {
            return Err(IdxError::Label { path: labels.to_owned(), label, index, classes }.into());
        }
        Self::new(shape, values, found, validation_share)
    }

    /// Height, width and channels of an image.
    pub fn shape(&self) -> [usize; 3] {
        self.shape
    }

    /// The images' values, image by image, each `[height, width, channels]`.
    pub fn images(&self) -> impl Iterator<Item = &[u8]> {
        self.pixels.chunks_exact(self.shape.iter().product())
    }

    /// The images' classes.
    pub fn labels(&self) -> &[u8] {
        &self.labels
    }

    /// The numbers of the images of the training part.
    pub fn training(&self) -> &[u32] {
        &self.training
    }

    /// The numbers of the images of the validation part.
    pub fn validation(&self) -> &[u32] {
        &self.validation
    }

    /// Checks that there is an image in both parts.
    ///
    /// # Errors
    /// [`Error::Setting`] with the part that is empty.
    pub fn expect_both_parts(&self) -> Result<()> {
        for (what, part) in [("training images", &self.training), ("validation images", &self.validation)] {
            if part.is_empty() {
                let found = format!("{} of {}", part.len(), self.labels.len());
                return Err(Error::Setting { what, found, expected: "at least one; give more images" });
            }
        }
        Ok(())
    }

    /// Tokens and classes of images, which are named by number.
    pub fn batch_of(&self, images: impl IntoIterator<Item = u32>, tokens: usize) -> Batch {
        let (mut inputs, mut targets) = (vec![], vec![]);
        for image in images {
            inputs.extend((0..tokens as u32).map(|token| image * tokens as u32 + token));
            targets.push(self.labels[image as usize].into());
        }
        Batch { samples: targets.len(), inputs, targets }
    }
}

/// A sample is an image, whose inputs are the numbers of its tokens among those of all images. Every pass over the
/// training part takes each image once, in an order of its own.
impl TrainingData for ImageSet {
    type Model<E: Engine> = Vit<E>;

    fn prepare<E: Engine>(&self, engine: &E, model: &mut Vit<E>) -> Result<()> {
        self.expect_both_parts()?;
        model.set_images(engine, self.shape, self.images(), &self.labels)
    }

    fn batch(&self, BatchShape { batch, positions }: BatchShape, seed: u64, step: u64) -> Batch {
        self.batch_of(drawn(&self.training, batch, seed, step), positions)
    }

    fn validation_batches(
        &self,
        BatchShape { batch, positions }: BatchShape,
        limit: usize,
    ) -> impl Iterator<Item = Batch> {
        let count = limit.clamp(1, self.validation.len().max(1)).min(self.validation.len());
        self.validation[..count].chunks(batch).map(move |images| self.batch_of(images.iter().copied(), positions))
    }

    /// FNV-1a over sizes, pixels, labels and the number of images for validation.
    fn fingerprint(&self) -> u64 {
        let [rows, columns, channels] = self.shape;
        let sizes =
            [rows, columns, channels, self.labels.len(), self.validation.len()].map(|n| (n as u64).to_le_bytes());
        let all = sizes.as_flattened().iter().chain(&self.pixels).chain(&self.labels);
        all.fold(0xCBF2_9CE4_8422_2325, |hash: u64, &b| (hash ^ u64::from(b)).wrapping_mul(0x100_0000_01B3))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(count: usize) -> ImageSet {
        let labels: Vec<u8> = (0..count).map(|i| (i % 7) as u8).collect();
        ImageSet::new([2, 2, 1], (0..4 * count).map(|i| i as u8).collect(), labels, 0.2).unwrap()
    }

    #[test]
    fn a_pass_takes_every_image_once_and_passes_differ() {
        let set = set(50);
        assert_eq!((set.training().len(), set.validation().len()), (40, 10));
        let mut all: Vec<u32> = set.training().iter().chain(set.validation()).copied().collect();
        all.sort_unstable();
        assert_eq!(all, (0..50).collect::<Vec<u32>>());
        let shape = BatchShape { batch: 8, positions: 1 };
        // Eight divides forty: five steps are a pass.
        let pass = |seed, number: u64| -> Vec<u32> {
            (5 * number..5 * number + 5).flat_map(|step| set.batch(shape, seed, step).inputs).collect()
        };
        let mut sorted = pass(3, 0);
        sorted.sort_unstable();
        let mut training = set.training().to_vec();
        training.sort_unstable();
        assert_eq!(sorted, training);
        assert_eq!(pass(3, 1), pass(3, 1));
        assert!(pass(3, 0) != pass(3, 1) && pass(3, 0) != pass(4, 0));
        // A batch that is longer than a pass goes into the next one.
        assert_eq!(set.batch(BatchShape { batch: 100, positions: 1 }, 3, 0).inputs[..40], pass(3, 0));
    }

    #[test]
    fn inputs_are_the_tokens_of_the_images_and_targets_their_classes() {
        let set = set(20);
        let batch = set.batch(BatchShape { batch: 3, positions: 5 }, 1, 2);
        assert_eq!((batch.inputs.len(), batch.targets.len()), (15, 3));
        for (tokens, class) in batch.inputs.chunks(5).zip(&batch.targets) {
            let image = tokens[0] / 5;
            assert_eq!(tokens, (5 * image..5 * image + 5).collect::<Vec<_>>());
            assert_eq!(*class, image % 7);
        }
        let shape = BatchShape { batch: 3, positions: 1 };
        let validated = |limit| set.validation_batches(shape, limit).map(|batch| batch.targets.len()).sum::<usize>();
        assert_eq!((validated(100), validated(2), validated(0)), (4, 2, 1));
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        assert!(ImageSet::new([2, 2, 1], vec![0; 7], vec![0; 2], 0.1).is_err());
        assert!(ImageSet::new([2, 0, 1], vec![], vec![0; 2], 0.1).is_err());
        assert!(ImageSet::new([2, 2, 1], vec![0; 8], vec![0; 2], 0.7).is_err());
        assert!(set(4).expect_both_parts().is_err(), "a fifth of four images is none");
        assert_ne!(set(20).fingerprint(), set(21).fingerprint());
    }
}
