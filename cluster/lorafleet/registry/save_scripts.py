"""The scripts that put back what Redis has lost; the keys' layout is in `scripts`."""

from __future__ import annotations

from lorafleet.registry.scripts import ANNOUNCE

# KEYS state, changes. ARGV fresh incarnation, generation. A rebuild that broke off goes on.
BEGIN = """
local state, changes = KEYS[1], KEYS[2]
if redis.call('HGET', state, 'rebuilding') then return redis.call('HGET', state, 'incarnation') end
if redis.call('HGET', state, 'incarnation') then return redis.error_reply('ERR not empty') end
redis.call('HSET', state, 'rebuilding', '1', 'incarnation', ARGV[1], 'generation', ARGV[2])
return ARGV[1]
"""

# KEYS state, changes, adapter, history, deleted, deleted history, names, deleted names,
#      deleted until, tenant.
# ARGV name, fresh incarnation, max changes, revision, when its grace ends in ms or '', history as
#      a JSON list, fields as a JSON object.
PUT_BACK = (
    ANNOUNCE
    + """
local state, changes, adapter, history, deleted, deleted_history = unpack(KEYS, 1, 6)
local names, deleted_names, deleted_until, tenant = unpack(KEYS, 7, 10)
local name, revision, until_ms = ARGV[1], tonumber(ARGV[4]), ARGV[5]
local is_deleted = until_ms ~= ''
local function newest(hash) return tonumber(redis.call('HGET', hash, 'revision') or '0') end
if newest(adapter) > revision or newest(deleted) > revision then return 'newer' end
if newest(is_deleted and deleted or adapter) == revision then return 'there' end
local function use(adapters, hash)
  local bytes = tonumber(redis.call('HGET', hash, 'bytes') or '0')
  redis.call('HINCRBY', tenant, 'used_adapters', adapters)
  redis.call('HINCRBY', tenant, 'used_bytes', string.format('%d', adapters * bytes))
end
local generation = tonumber(redis.call('HGET', state, 'generation') or '0')
if generation < revision then
  redis.call('HSET', state, 'generation', string.format('%d', revision))
end
announce(state, changes, ARGV[2], ARGV[3], 'adapter', name)
if redis.call('EXISTS', adapter) == 1 then use(-1, adapter) end
redis.call('DEL', adapter, history, deleted, deleted_history)
redis.call('ZREM', names, name)
redis.call('ZREM', deleted_names, name)
redis.call('ZREM', deleted_until, name)
if is_deleted then adapter, history = deleted, deleted_history end
for field, value in pairs(cjson.decode(ARGV[7])) do redis.call('HSET', adapter, field, value) end
for _, entry in ipairs(cjson.decode(ARGV[6])) do redis.call('RPUSH', history, entry) end
if is_deleted then
  redis.call('ZADD', deleted_names, 0, name)
  redis.call('ZADD', deleted_until, until_ms, name)
else
  redis.call('ZADD', names, 0, name)
  use(1, adapter)
end
return 'done'
"""
)

# KEYS state, changes, tenant, tenant names, API keys, ids of the tenant's API keys.
# ARGV name, fresh incarnation, max changes, whether the tenant is always there, fields and keys as
#      JSON objects.
PUT_BACK_TENANT = (
    ANNOUNCE
    + """
local state, changes, tenant, tenant_names, keys, key_ids = unpack(KEYS)
local name = ARGV[1]
if redis.call('HGET', tenant, 'created_ms') or redis.call('EXISTS', key_ids) == 1 then
  return 'there'
end
announce(state, changes, ARGV[2], ARGV[3], 'tenant', name)
for field, value in pairs(cjson.decode(ARGV[5])) do
  if string.sub(field, 1, 5) ~= 'used_' then redis.call('HSET', tenant, field, value) end
end
if ARGV[4] ~= '1' then redis.call('ZADD', tenant_names, 0, name) end
for id, text in pairs(cjson.decode(ARGV[6])) do
  announce(state, changes, ARGV[2], ARGV[3], 'key', id)
  redis.call('HSET', keys, id, text)
  redis.call('SADD', key_ids, id)
end
return 'done'
"""
)
