//! Plans and loaded kernels of a context, kept once for each kind and key.

use std::{
    any::{Any, TypeId},
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Plans or loaded kernels of one type, by key.
#[derive(Debug)]
pub struct Plans<K, V>(Mutex<HashMap<K, V>>);

impl<K, V> Default for Plans<K, V> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Eq + Hash, V: Clone> Plans<K, V> {
    /// Returns the value of a key, or else the result of `plan`, which is kept. Two threads may plan the same
    /// concurrently; either plan is valid.
    ///
    /// # Errors
    /// Those of `plan`.
    pub fn of<E>(&self, key: K, plan: impl FnOnce() -> Result<V, E>) -> Result<V, E> {
        if let Some(found) = lock(&self.0).get(&key) {
            return Ok(found.clone());
        }
        let planned = plan()?;
        lock(&self.0).insert(key, planned.clone());
        Ok(planned)
    }
}

/// The [`Plans`] of every pair of key and value types.
#[derive(Debug, Default)]
pub(crate) struct PlanCache(Mutex<HashMap<TypeId, Arc<dyn Any + Send + Sync>>>);

impl PlanCache {
    /// Returns the plans of a pair of types: the same at every call.
    pub(crate) fn plans<K: Send + 'static, V: Send + 'static>(&self) -> Arc<Plans<K, V>> {
        let mut all = lock(&self.0);
        let plans = all.entry(TypeId::of::<Plans<K, V>>()).or_insert_with(|| Arc::new(Plans::<K, V>::default()));
        // The entry of a type holds that type.
        plans.clone().downcast().unwrap_or_default()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_planned_once_for_each_type_of_plan_and_a_failure_is_not_kept() {
        let cache = PlanCache::default();
        let refused: Result<u32, &str> = cache.plans::<u8, u32>().of(1, || Err("no kernel"));
        assert_eq!(refused, Err("no kernel"));
        assert_eq!(cache.plans::<u8, u32>().of(1, || Ok::<_, &str>(10)), Ok(10));
        assert_eq!(cache.plans::<u8, u32>().of(1, || Err("planned twice")), Ok(10));
        assert_eq!(cache.plans::<u8, u32>().of(2, || Ok::<_, &str>(20)), Ok(20));
        assert_eq!(
            cache.plans::<u8, String>().of(1, || Ok::<_, &str>("of another type".into())).as_deref(),
            Ok("of another type")
        );
        assert_eq!(cache.plans::<u16, u32>().of(1, || Ok::<_, &str>(30)), Ok(30));
    }
}
